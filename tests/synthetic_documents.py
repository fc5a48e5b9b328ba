"""Documents without a model: tokens, blocks and landmark keys that follow from (text, layer,
block); their ingest.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.document import Document, IngestSettings
from memstore.disk.signature import Signature
from memstore.store.chunk import LayerBlocks
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
OTHER_MODEL = replace(SIGNATURE, weights="ef" * 20)


def token_ids(text: int, first: int, end: int) -> np.ndarray:
    """Tokens first .. end of a text."""
    return (np.arange(first, end, dtype=np.int64) * 7919 + text * 104_729) % 2000


def block(
    text: int, layer: int, number: int, length: int = BLOCK, *, shape: Signature = SIGNATURE
) -> LayerBlocks:
    """K, V [Hkv, block_size, D] and landmark key [Hkv, D] of one block; a short one differs from a
    full one.
    """
    random = np.random.Generator(
        np.random.Philox(key=[text, (layer << 40) + (number << 8) + length])
    )
    heads, size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
    values = random.standard_normal((heads, 2 * size + 1, dim), dtype=np.float32)
    k, v, landmark = torch.from_numpy(values).to(torch.float16).split([size, size, 1], dim=1)
    k, v = k.clone(), v.clone()
    k[:, length:] = 0
    v[:, length:] = 0
    return k, v, landmark[:, 0].clone()


def chunk(
    text: int, first: int, tokens: int, *, shape: Signature = SIGNATURE
) -> tuple[dict[int, LayerBlocks], int | None]:
    """Every layer's blocks of `tokens` tokens from block `first` on, and the length of a short last
    block.
    """
    count = -(-tokens // shape.block_size)
    last = tokens - (count - 1) * shape.block_size
    layers = {}
    for layer in range(shape.num_layers):
        blocks = [
            block(text, layer, first + i, last if i == count - 1 else shape.block_size, shape=shape)
            for i in range(count)
        ]
        k, v, landmarks = (torch.stack(parts) for parts in zip(*blocks))
        layers[layer] = (k, v, landmarks)
    return layers, None if last == shape.block_size else last


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
    """Every committed block, landmark key and token of a document is bit for bit that of the
    text.
    """
    shape = store.signature
    boundary = document.tokens // (CHUNK_BLOCKS * shape.block_size) * CHUNK_BLOCKS
    assert document.blocks == -(-document.tokens // shape.block_size)
    for layer in range(shape.num_layers):
        first = 0 if layer in shape.memory_layers else max(0, boundary - TOP_K)
        for number in range(first, document.blocks):
            length = min(shape.block_size, document.tokens - number * shape.block_size)
            k, v, landmark = block(text, layer, number, length, shape=shape)
            with store.lease(
                [BlockKey(document.id, layer, number, head) for head in range(shape.num_kv_heads)]
            ) as lease:
                assert torch.equal(bits(lease.k[lease.slots]), bits(k)), (layer, number)
                assert torch.equal(bits(lease.v[lease.slots]), bits(v)), (layer, number)
                assert lease.lengths.tolist() == [length] * shape.num_kv_heads
            if layer in shape.memory_layers and document.state == "ready":
                assert torch.equal(
                    store.landmark_keys(layer, [(document.id, number, number + 1)])[:, 0],
                    landmark.float(),
                )
    assert np.array_equal(store.tokens(document.id).ids, token_ids(text, 0, document.tokens))


def bits(values: Tensor) -> Tensor:
    """The raw bits of half-precision values."""
    return values.contiguous().view(torch.int16)


def stored(path: Path) -> dict[str, dict[bytes, bytes]]:
    """Everything that a memory's tables hold, without times and the random ids of writes: two
    memories of the same content are equal.
    """
    from memstore.disk.catalog import Catalog

    catalog = Catalog.open(path, read_only=True)
    try:
        with catalog.database.read() as txn:
            tables = {
                table: {key: bytes(value) for key, value in txn.scan(table)}
                for table in ("tokens", "landmarks")
            }
            tables["blocks"], tables["documents"] = {}, {}
            for row in catalog.documents(txn):
                for key, record in catalog.blocks.walk(txn, row.id):
                    header = catalog.blocks.header(record, key, row.write_of(key.block))
                    said = repr((header.codec, header.length, header.sizes)).encode()
                    tables["blocks"][repr(key).encode()] = said + bytes(record[header.start :])
                row = replace(row, created=0.0, writes=())
                tables["documents"][row.id.to_bytes(8, "big")] = repr(row).encode()
        return tables
    finally:
        catalog.close()


def is_whole(path: Path) -> bool:
    """What `verify` asks of a memory, walked in this process."""
    from memstore.store.walk import walk

    return all(event["event"] != "problem" for event in walk(path, set()))
