"""Documents without a model: tokens, blocks and landmark keys follow from (text, layer, block)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction, record_key
from memstore.disk.tables.catalog import Catalog
from memstore.store.chunks import LayerBlocks
from memstore.store.memory_store import MemoryStore

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
CHUNK_BLOCKS, TOP_K = 4, 2
CHUNK = CHUNK_BLOCKS * BLOCK
SETTINGS = IngestSettings(CHUNK_BLOCKS, TOP_K)
SIGNATURE = Signature(
    weights="ab" * 20,
    tokenizer="cd" * 20,
    architecture={"rope_base": 10000.0},
    kv_dtype="float16",
    num_layers=LAYERS,
    memory_layers=(1, 2),
    num_kv_heads=HEADS,
    head_dim=DIM,
    block_size=BLOCK,
)
BUDGET = 1 << 20  # bytes in main memory: the blocks are tiny, and 1 GiB would be millions of slots
OTHER_MODEL = replace(SIGNATURE, weights="ef" * 20)


def opened(place: Path | str, **options: Any) -> MemoryStore:
    """A memory with a small host tier."""
    return MemoryStore.open(place, **{"host_budget": BUDGET, **options})


def token_ids(text: int, first: int, end: int) -> np.ndarray:
    """Tokens first .. end of a text."""
    return (np.arange(first, end, dtype=np.int64) * 7919 + text * 104_729) % 2000


def blocks(
    text: int, layer: int, first: int, tokens: int, *, shape: Signature = SIGNATURE
) -> LayerBlocks:
    """K, V [n, Hkv, block_size, D] and landmark keys [n, Hkv, D] of `tokens` tokens' blocks from
    block `first` on; a short last one differs from a full one.

    Values are about normal, and each block's follow from its number alone.
    """
    heads, size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
    numbers = np.arange(first, first + -(-tokens // size))
    lengths = np.minimum(tokens - (numbers - first) * size, size)
    which = (layer << 40 | numbers << 8 | lengths).astype(np.uint64)
    seeds = _mixed(_mixed(np.full(len(numbers), text)) ^ which)
    count = heads * (2 * size + 1) * dim
    random = _mixed(seeds[:, None] + np.arange(count, dtype=np.uint64))  # (n, count), of 64 bits
    sums = random.view(np.uint16).reshape(len(numbers), count, 4).sum(-1, dtype=np.float32)
    values = torch.from_numpy((sums - 131_070) / 37_837).to(torch.float16)
    k, v, landmarks = values.view(-1, heads, 2 * size + 1, dim).split([size, size, 1], dim=2)
    padding = torch.arange(size) >= torch.from_numpy(lengths)[:, None]
    k, v = (x.masked_fill(padding[:, None, :, None], 0) for x in (k, v))
    return k, v, landmarks[:, :, 0].clone()


def _mixed(x: np.ndarray) -> np.ndarray:
    """64 bits that look random, of each number (Steele's SplitMix64)."""
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def block(
    text: int, layer: int, number: int, length: int = BLOCK, *, shape: Signature = SIGNATURE
) -> LayerBlocks:
    """K, V [Hkv, block_size, D] and landmark key [Hkv, D] of one block."""
    k, v, landmarks = blocks(text, layer, number, length, shape=shape)
    return k[0], v[0], landmarks[0]


def chunk(
    text: int, first: int, tokens: int, *, shape: Signature = SIGNATURE
) -> tuple[dict[int, LayerBlocks], int | None]:
    """Every layer's blocks of `tokens` tokens from block `first` on, and the length of a short last
    block.
    """
    layers = {
        layer: blocks(text, layer, first, tokens, shape=shape) for layer in range(shape.num_layers)
    }
    return layers, tokens % shape.block_size or None


def ingest(
    store: MemoryStore,
    name: str,
    tokens: int,
    *,
    text: int = 1,
    mode: str = "new",
    commit_bytes: int = 1,
    source_hash: str | None = None,
    after_chunk: Callable[[int], None] = lambda tokens: None,
) -> Document:
    """Read the first `tokens` tokens of a text, from where the document's writer says; a chunk a
    commit by default.
    """
    shape = store.signature
    size = CHUNK_BLOCKS * shape.block_size
    writer = store.write_document(
        name,
        source_hash=source_hash or f"{text}:{tokens}",
        settings=SETTINGS,
        mode=mode,
        commit_bytes=commit_bytes,
    )
    if writer is None:
        return store.document(name)
    with writer:
        for first in range(writer.tokens, tokens, size):
            end = min(first + size, tokens)
            layers, short = chunk(text, first // shape.block_size, end - first, shape=shape)
            writer.add_chunk(token_ids(text, first, end), first * 3, layers, short)
            after_chunk(end)
        return writer.finish()


def check_content(store: MemoryStore, document: Document, text: int) -> None:
    """Every committed block, landmark key and token equals that of the text, bit for bit."""
    shape = store.signature
    size, heads = shape.block_size, range(shape.num_kv_heads)
    at_once = max(1, min(8, store.tiers.top.capacity // len(heads)))  # blocks
    assert document.blocks == -(-document.tokens // size)
    for layer, first in document.first_blocks(shape).items():
        tokens = document.tokens - first * size
        k, v, landmarks = blocks(text, layer, first, tokens, shape=shape)
        for some in range(0, len(k), at_once):
            units = [
                BlockKey(document.id, layer, first + some + at, head)
                for at in range(len(k[some : some + at_once]))
                for head in heads
            ]
            lengths = [min(size, document.tokens - unit.block * size) for unit in units]
            with store.lease(units) as lease:
                for found, wanted in ((lease.k, k), (lease.v, v)):
                    expected = wanted[some : some + at_once].flatten(0, 1)
                    assert torch.equal(bits(found[lease.slots]), bits(expected)), (layer, some)
                assert lease.lengths.tolist() == lengths
        if layer in shape.memory_layers and document.state == "ready":
            scope = [(document.id, 0, document.blocks)]
            found = store.retrieval.landmarks(scope).keys(layer, scope)
            assert torch.equal(found, landmarks.transpose(0, 1).float())
    assert np.array_equal(store.tokens(document.id).ids, token_ids(text, 0, document.tokens))


def bits(values: Tensor) -> Tensor:
    """The raw bits of half-precision values."""
    return values.contiguous().view(torch.int16)


def contents(catalog: Catalog, txn: Transaction) -> dict[bytes, bytes]:
    """Every record of a memory, checked, as its header and payload, without the write that made it:
    the same for two memories that were given the same.
    """
    found = {}
    for document in catalog.documents(txn):
        for key, data in catalog.blocks.walk(txn, document.id):
            write = document.write
            catalog.blocks.check(data, key, write)
            header = catalog.blocks.header(data, key, write)
            found[record_key(key)] = repr(header).encode() + data[header.start :]
    return found


def stored(path: Path) -> dict[str, dict[bytes, bytes]]:
    """Everything that a memory's tables hold, without times and ids of writes: two memories of the
    same content are equal.
    """
    catalog = Catalog.open(path, read_only=True)
    try:
        with catalog.database.read() as txn:
            tables = {
                table: {key: bytes(value) for key, value in txn.scan(table)}
                for table in ("tokens", "landmarks")
            }
            tables["blocks"] = contents(catalog, txn)
            rows = [replace(row, created=0.0, write=b"") for row in catalog.documents(txn)]
            tables["documents"] = {row.id.to_bytes(8, "big"): repr(row).encode() for row in rows}
        return tables
    finally:
        catalog.close()


def is_whole(path: Path) -> bool:
    """Does `verify` find nothing wrong?"""
    from memstore.store.verify import verify_memory

    return verify_memory(path).clean
