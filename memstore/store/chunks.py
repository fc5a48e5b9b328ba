"""The chunks of a document, or batches of its passages, as its writer gets them: they are checked,
encoded, and committed in transactions of whole chunks.

Transactions of several documents interleave; each is stored completely or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import (
    RUN_BLOCKS,
    BlockWords,
    Run,
    RunTable,
    Words,
    joined,
    kinds_of,
    run_of,
)
from memstore.disk.tables.texts import Digest, Passage, encode_part, encode_tokens
from memstore.errors import CorruptMemory, InvalidInput, StorageFull
from memstore.tiers.raw_bits import from_raw, raw_view, torch_dtype

LayerBlocks = tuple[Tensor, Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype.
"""

KeysValues = tuple[Tensor, Tensor]
"""K, V [tokens, width] of a passage, in the KV dtype."""


@dataclass(eq=False)
class Chunk:
    """A checked chunk, or batch of passages, before it is committed."""

    first_block: int
    first_token: int
    lengths: list[int]  # tokens of each block
    part: tuple[int, bytes]  # key and value in the table of tokens
    end: int  # for passages: characters of the document up to their end
    whole: bool  # another chunk may follow
    blocks: dict[int, tuple[Tensor, Tensor]]  # layer -> K, V of a chunk
    runs: dict[int, Run]  # part -> search data of its blocks
    digests: Sequence[Digest] = ()  # of the passages
    kv: Mapping[int, KeysValues] = field(default_factory=dict)  # position in `digests` -> K, V
    units: list[BlockKey] = field(default_factory=list)  # pinned blocks of the chunk
    # (block, layer) of a chunk, or (position in `digests`, 0) -> record, once encoded
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def end_block(self) -> int:
        """The block number after its last block."""
        return self.first_block + len(self.lengths)

    @property
    def end_token(self) -> int:
        """The token number after its last token."""
        return self.first_token + sum(self.lengths)


def finite(parts: Sequence[Tensor]) -> bool:
    """Whether all numbers of these tensors are finite."""
    # a NaN makes both the least and the greatest number NaN
    ends = [end for part in parts if part.numel() for end in part.aminmax()]
    return not ends or bool(torch.stack(ends).isfinite().all())


def check_chunk(
    catalog: Catalog,
    document: Document,
    first_block: int,
    ids: np.ndarray,
    char_start: int,
    layers: Mapping[int, LayerBlocks],
    length_of_last: int | None,
) -> Chunk:
    """Check a chunk at first_block: see DocumentWriter.add_chunk. Raises InvalidInput."""
    heads, size, dim = catalog.signature.geometry.shape
    n = layers[0][0].shape[0]
    blocks, keys = (n, heads, size, dim), (n, heads, dim)
    for layer, parts in layers.items():
        _check_tensors(catalog, f"layer {layer}", parts, (blocks, blocks, keys))
        _check_finite(catalog, f"layer {layer}, blocks {first_block} to {first_block + n}", parts)
    last = size if length_of_last is None else length_of_last
    return Chunk(
        first_block=first_block,
        first_token=first_block * size,
        lengths=[*[size] * (n - 1), last],
        part=(first_block * size, encode_tokens(char_start, ids)),
        end=0,
        whole=n == document.settings.chunk_blocks and last == size,
        blocks={layer: (k, v) for layer, (k, v, _) in layers.items()},
        runs={
            layer: Run.of_keys(first_block, raw_view(keys.clone()))
            for layer, (_, _, keys) in layers.items()
        },
    )


def check_batch(
    catalog: Catalog,
    document: Document,
    at: tuple[int, int, int],
    passages: Sequence[Passage],
    kv: Mapping[int, KeysValues],
    landmarks: Tensor | None,
    words: Sequence[Words] | None,
) -> Chunk:
    """Check passages that begin at `at`: block, token and character; kv: K, V by position in
    `passages`. See DocumentWriter.add_passages. Raises InvalidInput.
    """
    block, token, character = at
    lengths = [len(passage.ids) for passage in passages]
    for number, both in kv.items():
        shape = (lengths[number], catalog.signature.head_dim)
        _check_tensors(catalog, "a passage", both, (shape, shape))
    every = [half for both in kv.values() for half in both]
    _check_finite(catalog, f"passages from {block} on", every)
    return Chunk(
        first_block=block,
        first_token=token,
        lengths=lengths,
        part=(block, encode_part(character, passages)),
        end=passages[-1].end,
        whole=True,
        blocks={},
        runs=_selector_runs(catalog.runs, block, lengths, landmarks, words),
        digests=catalog.digests(document, passages),
        kv=kv,
    )


def _check_tensors(
    catalog: Catalog, what: str, parts: Sequence[Tensor], expected: Sequence[tuple[int, ...]]
) -> None:
    dtype = torch_dtype(catalog.signature.kv_dtype)
    shapes = tuple(tuple(part.shape) for part in parts)
    if shapes != expected or {part.dtype for part in parts} != {dtype}:
        raise InvalidInput(f"{what}: expected {expected} {dtype}, got {shapes} {parts[0].dtype}")


def _check_finite(catalog: Catalog, what: str, parts: Sequence[Tensor]) -> None:
    if not finite(parts):
        raise InvalidInput(
            f"{what}: keys, values or landmark keys are not finite; the model cannot read this "
            f"text in {catalog.signature.kv_dtype}, use one that can"
        )


def _selector_runs(
    table: RunTable,
    first_block: int,
    lengths: Sequence[int],
    landmarks: Tensor | None,
    words: Sequence[Words] | None,
) -> dict[int, Run]:
    """A selector's search data of consecutive blocks, by part of the table; lengths: tokens of each
    block. Raises InvalidInput for data that does not match the selector's spec.
    """
    spec, runs = table.spec, dict[int, Run]()
    assert spec is not None
    if (landmarks is not None) != (spec.width > 0) or (words is not None) != spec.words:
        raise InvalidInput(f"selector {spec.name} needs {kinds_of(spec)} of passages")
    if landmarks is not None:
        shape = (sum(lengths), spec.width)
        if tuple(landmarks.shape) != shape or landmarks.dtype != torch.int8:
            raise InvalidInput(
                f"expected token landmarks {list(shape)} torch.int8, got {list(landmarks.shape)} "
                f"{landmarks.dtype}"
            )
        bits = landmarks.detach().cpu().numpy().copy()
        run = Run.of_tokens(first_block, bits, np.array(lengths, np.int64))
        runs[table.part("token")] = run
    if words is not None:
        if len(words) != len(lengths):
            raise InvalidInput(
                f"expected the words of {len(lengths)} passages, got those of {len(words)}"
            )
        runs[table.part("words")] = Run.of_words(first_block, BlockWords.of(words))
    return runs


class Commits:
    """Encodes and commits the chunks of one document, in order.

    Layers without memory store only their latest blocks, the ones that a resumed ingest attends to.
    """

    def __init__(self, catalog: Catalog, document: Document, replaces: Document | None) -> None:
        """document: its committed row; replaces: the document to delete when this one is ready."""
        self.row = document
        self._catalog, self._replaces = catalog, replaces
        self._other_layers = document.other_layers(catalog.signature)
        self._keep = self.keep_from(document.blocks)  # first stored block of layers without memory

    def keep_from(self, end: int) -> int:
        """The first block of layers without memory that an ingest needs after block `end`."""
        return max(0, end - self.row.settings.top_k)

    def replace_by_stored(self, chunk: Chunk) -> None:
        """Replace a chunk's tensors by their decoded records, which a resumed ingest reads."""
        catalog, blocks = self._catalog, range(chunk.first_block, chunk.end_block)
        if get_codec(catalog.codec).lossless:
            return
        for layer in chunk.blocks:
            self._encode(chunk, layer, chunk.first_block)
            keys = [RecordKey(self.row.id, block, layer) for block in blocks]
            stored = [
                catalog.blocks.decode(chunk.records[key.block, layer], key, self.row.write)
                for key in keys
            ]
            k, v = (np.stack(half) for half in list(zip(*stored))[:2])
            dtype = catalog.signature.kv_dtype
            chunk.blocks[layer] = from_raw(k, dtype), from_raw(v, dtype)

    def commit(self, chunks: Sequence[Chunk], *, final: bool) -> None:
        """Store the next chunks in one transaction. Raises what Database.write raises.

        final: also make the document ready, and delete the document that it replaces.
        """
        end = chunks[-1].end_block if chunks else self.row.blocks
        keep = end if final else self.keep_from(end)  # a finished document needs none
        for chunk in chunks:
            self._encode_all(chunk, keep)
        first_run = end if final else run_of("landmark", keep)  # kept of layers without memory
        replaces = self._replaces if final else None

        def work(txn: Transaction) -> Document:
            row, catalog = self.row, self._catalog
            number, size = row.id, row.bytes
            if layers := self._other_layers:  # passages have none
                size -= catalog.blocks.delete_layers(txn, number, layers, self._keep, keep)
            for chunk in chunks:
                size += self._refer(txn, chunk)
                catalog.texts.put_part(txn, number, *chunk.part)
            for block, layer, record in self._records(chunks, keep):
                size += catalog.blocks.put(txn, RecordKey(number, block, layer), record)
            gone = range(run_of("landmark", self._keep), first_run, RUN_BLOCKS["landmark"])
            for layer, first in product(self._other_layers, gone):
                catalog.runs.delete_run(txn, number, layer, first)
            for part, run in self._runs(txn, chunks, keep):
                catalog.runs.put(txn, number, part, run)
            if chunks:
                row = replace(row, blocks=end, tokens=chunks[-1].end_token)
            if replaces is not None:
                catalog.delete_document(txn, replaces.id)
            if final and row.of_passages:
                size = catalog.record_bytes(txn, row)
            row = replace(row, bytes=size, state="ready" if final else row.state)
            catalog.put_document(txn, row)
            return row

        self.row = self._catalog.database.write(work)
        self._keep = keep

    def delete_empty(self) -> None:
        """Delete the document's row if no content was stored because the disk is full; otherwise it
        would look like an interrupted ingest.
        """

        def work(txn: Transaction) -> None:
            # read the row again: a commit that failed at its end may be stored
            row = self._catalog.row(txn, self.row.id)
            if row is not None and not row.blocks and row.state != "ready":
                self._catalog.delete_document(txn, row.id)

        with suppress(StorageFull):
            self._catalog.database.write(work)

    # Records

    def _encode_all(self, chunk: Chunk, keep: int) -> None:
        """Encode a chunk's records; in layers without memory, those of blocks from `keep` on."""
        for number, (k, v) in chunk.kv.items():
            chunk.records[number, 0] = self._catalog.blocks.encode_passage(
                raw_view(k), raw_view(v), chunk.digests[number], self.row.codec
            )
        for layer in chunk.blocks:
            first = max(chunk.first_block, keep if layer in self._other_layers else 0)
            if first < chunk.end_block and (chunk.end_block - 1, layer) not in chunk.records:
                self._encode(chunk, layer, first)

    def _encode(self, chunk: Chunk, layer: int, first: int) -> None:
        """Encode a chunk's blocks of one layer from block `first` on."""
        at = first - chunk.first_block
        k, v = (raw_view(half[at:]) for half in chunk.blocks[layer])
        key = RecordKey(self.row.id, first, layer)
        records = self._catalog.blocks.encode(key, k, v, chunk.lengths[at:], self.row.write)
        chunk.records |= {(block, layer): one for block, one in enumerate(records, first)}

    def _records(self, chunks: Sequence[Chunk], keep: int) -> list[tuple[int, int, bytes]]:
        """(block, layer, record) of the chunks' stored records, in the order of keys."""
        return sorted(
            (block, layer, record)
            for chunk in chunks
            if not chunk.digests
            for (block, layer), record in chunk.records.items()
            if block >= keep or layer not in self._other_layers
        )

    def _refer(self, txn: Transaction, chunk: Chunk) -> int:
        """Count references to a chunk's passages, and store the records of passages that have none;
        return the bytes of all their records.
        """
        passages, size = self._catalog.passages, 0
        rows = self._catalog.refer(txn, self.row, chunk.first_block, chunk.digests)
        for number, row in enumerate(rows):
            if not row.bytes:  # an earlier equal passage of the chunk may have stored it
                row = passages.row(txn, row.number) or row
            record = chunk.records.get((number, 0))
            if not row.bytes and record is not None:
                passages.store(txn, row, record)
                row = row._replace(bytes=len(record))
            size += row.bytes
        return size

    # Search data

    def _runs(
        self, txn: Transaction, chunks: Sequence[Chunk], keep: int
    ) -> Iterator[tuple[int, Run]]:
        """(part, run) of each run that a commit writes: whole runs of the grid; the first may
        begin with blocks that are stored already. Raises CorruptMemory.
        """
        if not chunks:
            return
        table, begin, end = self._catalog.runs, chunks[0].first_block, chunks[-1].end_block
        for part, kind in table.parts(range(self._catalog.signature.num_layers)).items():
            oldest = max(begin, keep) if part in self._other_layers else begin
            grid = range(run_of(kind, oldest), end, RUN_BLOCKS[kind]) if oldest < end else ()
            for first in grid:
                stop = first + RUN_BLOCKS[kind]
                some = [
                    chunk.runs[part].cut(first, stop)
                    for chunk in chunks
                    if chunk.first_block < stop and chunk.end_block > first
                ]
                if first < begin:
                    stored = table.run(txn, self.row.id, part, first)
                    if stored is None or stored.end_block != begin:
                        raise CorruptMemory(
                            f"landmarks of document {self.row.name!r} before block {begin}, part "
                            f"{part}, are missing; run verify"
                        )
                    some.insert(0, stored)
                yield part, joined(first, some)
