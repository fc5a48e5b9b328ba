"""The transactions that a document is written by: whole chunks, staged, then encoded on one thread
and committed in order on another. Transactions of several documents interleave; each is stored
completely or not at all.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from memstore.block import RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, KeyRun, Run, joined, run_of
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, StorageFull
from memstore.store.write.chunk import Chunk
from memstore.tiers.raw_bits import from_raw, raw_view


class Encoder:
    """Encodes the chunks of one document."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        self.lossless = get_codec(catalog.codec).lossless
        self._dtype, self._table = catalog.signature.kv_dtype, catalog.blocks
        self._document = document
        self._other_layers = {*document.other_layers(catalog.signature)}

    def encode(self, chunk: Chunk, keep: int = 0) -> None:
        """Have a chunk hold records in place of keys and values, where it does not yet; of layers
        without memory only those of blocks from `keep` on.
        """
        for number, halves in chunk.kv.items():
            k, v = map(raw_view, halves)
            record = self._table.encode_passage(k, v, chunk.digests[number], self._document.codec)
            chunk.records[number, 0] = record
        chunk.kv = {}
        for layer, halves in chunk.blocks.items():
            first = max(chunk.first_block, keep if layer in self._other_layers else 0)
            if first < chunk.end_block and (chunk.end_block - 1, layer) not in chunk.records:
                skipped = first - chunk.first_block
                k, v = (raw_view(x[skipped:]) for x in halves)
                key, lengths = RecordKey(self._document.id, first, layer), chunk.lengths[skipped:]
                records = self._table.encode(key, k, v, lengths, self._document.write)
                chunk.records |= {(block, layer): one for block, one in enumerate(records, first)}
        other = self._other_layers
        chunk.blocks = {layer: both for layer, both in chunk.blocks.items() if layer in other}

    def replace_by_stored(self, chunk: Chunk) -> None:
        """Have a chunk hold what its records decode to, as a resumed ingest would read it."""
        layers = list(chunk.blocks)
        self.encode(chunk)
        for layer in layers:
            stored = [
                self._table.decode(
                    chunk.records[block, layer],
                    RecordKey(self._document.id, block, layer),
                    self._document.write,
                )
                for block in range(chunk.first_block, chunk.end_block)
            ]
            chunk.blocks[layer] = (
                from_raw(np.stack([k for k, _, _ in stored]), self._dtype),
                from_raw(np.stack([v for _, v, _ in stored]), self._dtype),
            )


class RecentLandmarks:
    """Landmark keys of the latest blocks of layers without memory, which are in no index: a resumed
    ingest attends to them.
    """

    def __init__(self, catalog: Catalog, document: Document, keep: int) -> None:
        """keep: the first block that is stored of these layers. Raises CorruptMemory."""
        geometry, end = catalog.signature.geometry, document.blocks
        nothing = np.zeros((0, geometry.num_kv_heads, geometry.head_dim), f"<i{geometry.itemsize}")
        first = run_of("landmark", keep)
        grid = range(first, end, RUN_BLOCKS["landmark"]) if keep < end else ()
        self._kept: dict[int, KeyRun] = {}
        with catalog.database.read() as txn:
            for layer in document.other_layers(catalog.signature):
                runs = [catalog.runs.run(txn, document.id, layer, start) for start in grid]
                keys = [run.keys for run in runs if isinstance(run, KeyRun)]
                stored = KeyRun(first, np.concatenate([nothing, *keys]))
                if grid and stored.end_block != end:
                    raise _missing(document, f"layer {layer}", end)
                self._kept[layer] = stored.cut(keep, end) if grid else KeyRun(end, nothing)

    def add(self, chunk: Chunk, keep: int) -> None:
        """Take those of the next chunk, and let those of blocks before `keep` go."""
        for layer, before in self._kept.items():
            run = chunk.runs[layer]
            assert isinstance(run, KeyRun)
            both = KeyRun(before.first_block, np.concatenate([before.keys, run.keys]))
            self._kept[layer] = both.cut(keep, chunk.end_block)

    def keys(self, layer: int, blocks: range) -> np.ndarray:
        """Raw bits [n, Hkv, D] of these blocks."""
        return self._kept[layer].cut(blocks.start, blocks.stop).keys


class Commits:
    """The stored part of one document, and the chunks that are on their way. Usable from several
    threads.
    """

    def __init__(
        self,
        catalog: Catalog,
        document: Document,
        *,
        replaces: Document | None,
        commit_bytes: int,
        on_commit: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """document: its row as it is committed; replaces: the document that is deleted when this
        one is ready. commit_bytes: of a transaction. on_commit: called on the background thread
        with chunks that are stored now. Raises CorruptMemory.
        """
        self.row = document
        self.error: BaseException | None = None  # nothing is committed after it
        self.encoder = Encoder(catalog, document)
        self._catalog, self._replaces, self._on_commit = catalog, replaces, on_commit
        self._commit_bytes = commit_bytes
        self._other_layers = document.other_layers(catalog.signature)
        # first block that is stored of layers without memory
        self._keep = self.keep_from(document.blocks)
        self.recent = RecentLandmarks(catalog, document, self._keep)
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="memstore-encoder")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-writer")
        self._lock = threading.Lock()  # of the next four
        self._staged: list[Chunk] = []
        self._staged_bytes = 0
        self._submitted: deque[tuple[Future[None], int]] = deque()  # commits and their bytes
        self._submitted_bytes = 0

    def keep_from(self, end: int) -> int:
        """The first block of layers without memory that reading on after block `end` needs."""
        return max(0, end - self.row.settings.top_k)

    def add(self, chunk: Chunk, size: int) -> None:
        """Stage the next chunk, which makes a transaction larger by `size` bytes. Commit the staged
        chunks once they fill a transaction, and wait while storage is far behind. Raises what
        committing raised.
        """
        self.recent.add(chunk, self.keep_from(chunk.end_block))
        with self._lock:
            self._staged.append(chunk)
            self._staged_bytes += size
            encode = partial(self.encoder.encode, chunk, chunk.end_block)
            chunk.encoding = self._encoding.submit(encode)
        if self._staged_bytes >= self._commit_bytes:
            self.submit()
        while self._submitted_bytes > 2 * self._commit_bytes:
            self._wait_for_one()
        self.check()

    def submit(self, *, final: bool = False) -> None:
        """Commit the whole chunks that are staged in the background; final: all of them, and the
        document is ready.
        """
        with self._lock:
            chunks = [chunk for chunk in self._staged if chunk.whole or final]
            self._staged = [chunk for chunk in self._staged if not (chunk.whole or final)]
            size, self._staged_bytes = self._staged_bytes, 0
            if chunks or final:
                self._submitted_bytes += size
                self._submitted.append((self._thread.submit(self._run, chunks, final), size))

    def wait(self) -> None:
        """Wait for everything that was submitted until now."""
        with self._lock:
            submitted = list(self._submitted)
        for future, _ in submitted:
            future.exception()

    def check(self) -> None:
        """Raises what committing raised."""
        while self._submitted and self._submitted[0][0].done():
            self._wait_for_one()
        if self.error is not None:
            raise self.error

    def _wait_for_one(self) -> None:
        """Wait for the oldest commit; its error is in `error`. Called by the writer's thread."""
        future, size = self._submitted[0]
        future.exception()
        with self._lock:
            self._submitted.popleft()
            self._submitted_bytes -= size

    def close(self, *, finished: bool) -> None:
        """Commit the whole chunks that are staged, unless the document is finished or committing
        failed, and end the thread.
        """
        if not finished and self.error is None:
            self.submit()
        self._staged = []
        self._encoding.shutdown(wait=True)
        self._thread.shutdown(wait=True)

    def delete_empty(self) -> None:
        """Delete the row of a document that there was no room for: it would be taken for a
        document that was begun.
        """
        document, catalog = self.row.id, self._catalog

        def work(txn: Transaction) -> None:
            # the stored row: a commit may have succeeded and failed to give back its room
            row = catalog.row(txn, document)
            if row is not None and not row.blocks and row.state != "ready":
                catalog.delete_document(txn, document)

        if isinstance(self.error, StorageFull):
            with suppress(StorageFull):
                catalog.database.write(work, beyond_limit=True)

    def _run(self, chunks: Sequence[Chunk], final: bool) -> None:
        if self.error is not None:
            return  # nothing may follow what was not stored
        try:
            self._commit(chunks, final)
        except BaseException as error:
            self.error = error
            raise

    def _commit(self, chunks: Sequence[Chunk], final: bool) -> None:
        end = chunks[-1].end_block if chunks else self.row.blocks
        keep = end if final else self.keep_from(end)  # nothing is read after a finished document
        for chunk in chunks:
            assert chunk.encoding is not None
            chunk.encoding.result()  # or its error
            self.encoder.encode(chunk, keep)  # what is left: of layers without memory
        records = sorted(
            (block, layer, record)
            for chunk in chunks
            if not chunk.digests
            for (block, layer), record in chunk.records.items()
            if block >= keep or layer not in self._other_layers
        )
        first_run = end if final else run_of("landmark", keep)  # that stays of other layers
        replaces = self._replaces if final else None

        def work(txn: Transaction) -> Document:
            row, catalog = self.row, self._catalog
            number, size = row.id, row.bytes
            size += sum(self._refer(txn, chunk) for chunk in chunks)
            size -= catalog.blocks.delete_layers(txn, number, self._other_layers, self._keep, keep)
            for block, layer, record in records:
                size += catalog.blocks.put(txn, RecordKey(number, block, layer), record)
            gone = range(run_of("landmark", self._keep), first_run, RUN_BLOCKS["landmark"])
            for layer, first in product(self._other_layers, gone):
                catalog.runs.delete_run(txn, number, layer, first)
            for part, run in self._runs(txn, chunks, keep):
                catalog.runs.put(txn, number, part, run)
            for chunk in chunks:
                catalog.texts.put_part(txn, number, *chunk.part)
            if chunks:
                row = replace(row, blocks=end, tokens=chunks[-1].end_token)
            if replaces is not None:
                catalog.delete_document(txn, replaces.id)
            if final and row.of_passages:
                size = catalog.record_bytes(txn, row)
            row = replace(row, bytes=size, state="ready" if final else row.state)
            catalog.put_document(txn, row)
            return row

        self.row = self._catalog.database.write(work, beyond_limit=replaces is not None)
        self._keep = keep
        if chunks:
            self._on_commit(chunks)

    def _runs(
        self, txn: Transaction, chunks: Sequence[Chunk], keep: int
    ) -> Iterator[tuple[int, Run]]:
        """The parts and runs that a commit of chunks writes: whole runs of the grid, of which the
        first begins with stored blocks. Raises CorruptMemory.
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
                        raise _missing(self.row, f"part {part}", begin)
                    some.insert(0, stored)
                yield part, joined(first, some)

    def _refer(self, txn: Transaction, chunk: Chunk) -> int:
        """Count the references to a chunk's passages, and store the records of those that have
        none; return the bytes of all their records.
        """
        passages, size = self._catalog.passages, 0
        rows = self._catalog.refer(txn, self.row, chunk.first_block, chunk.digests)
        for number, row in enumerate(rows):
            if not row.bytes:  # the chunk may hold the same passage before
                row = passages.row(txn, row.number) or row
            record = chunk.records.get((number, 0))
            if not row.bytes and record is not None:
                passages.store(txn, row, record)
                row = row._replace(bytes=len(record))
            size += row.bytes
        return size


def _missing(document: Document, part: str, block: int) -> CorruptMemory:
    return CorruptMemory(
        f"landmarks of document {document.name!r} before block {block}, {part}, are missing; run "
        "verify"
    )
