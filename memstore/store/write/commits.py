"""The transactions that a document is written by: whole chunks each, staged, encoded on one thread
and committed in order on another, so that the next chunk is encoded while the last one is
committed. Transactions of several documents interleave; each of them is all there or not at all.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import dropwhile, product

import numpy as np

from memstore.block import RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, Run, joined, run_of
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, StorageFull
from memstore.store.write.chunk import Chunk
from memstore.tiers.raw_bits import from_raw, raw_view


class Encoder:
    """Encodes the chunks of one document, in order."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        self.lossless = get_codec(catalog.codec).lossless
        self._signature, self._blocks = catalog.signature, catalog.blocks
        self._document, self._write = document.id, document.write
        self._codec = document.codec  # of passages
        self._memory_layers = document.memory_layers(catalog.signature)
        self._other_layers = document.other_layers(catalog.signature)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-encoder")

    def ahead(self, chunk: Chunk) -> None:
        """Begin to encode a chunk's memory layers; its `encoding` tells when that is done."""
        chunk.encoding = self._thread.submit(self._encode, chunk)

    def _encode(self, chunk: Chunk) -> None:
        """Have the chunk hold records in the place of its memory layers' blocks, or passages."""
        for number, (k, v) in zip(chunk.given, chunk.kv):
            bits, digest = (raw_view(k), raw_view(v)), chunk.digests[number]
            layers = self._memory_layers
            found = self._blocks.encode_passage(layers, *bits, digest, self._codec)
            chunk.records.update(((number, layer), record) for layer, record in found.items())
        chunk.kv = ()
        layers = [layer for layer in self._memory_layers if layer in chunk.blocks]
        self.add_records(chunk, layers, chunk.first_block)
        for layer in layers:
            del chunk.blocks[layer]

    def add_records(self, chunk: Chunk, layers: Iterable[int], first: int) -> None:
        """Encode the chunk's blocks from `first` on where that has not been done."""
        first = max(first, chunk.first_block)
        for layer in layers:
            if first < chunk.end_block and (chunk.end_block - 1, layer) not in chunk.records:
                k, v = (raw_view(x[first - chunk.first_block :]) for x in chunk.blocks[layer])
                key = RecordKey(self._document, first, layer)
                lengths = chunk.lengths[first - chunk.first_block :]
                records = self._blocks.encode(key, k, v, lengths, self._write)
                chunk.records.update(
                    ((block, layer), record) for block, record in enumerate(records, first)
                )

    def replace_by_stored(self, chunk: Chunk) -> None:
        """Have the chunk hold what reading its records will give: a resumed ingest would read just
        that.
        """
        layers = [*self._memory_layers, *self._other_layers]
        self.add_records(chunk, layers, chunk.first_block)
        for layer in layers:
            stored = [
                self._blocks.decode(
                    chunk.records[block, layer],
                    RecordKey(self._document, block, layer),
                    self._write,
                )
                for block in range(chunk.first_block, chunk.end_block)
            ]
            chunk.blocks[layer] = (
                from_raw(np.stack([k for k, _, _ in stored]), self._signature.kv_dtype),
                from_raw(np.stack([v for _, v, _ in stored]), self._signature.kv_dtype),
            )

    def close(self) -> None:
        """Wait for what was begun, and end the thread."""
        self._thread.shutdown(wait=True)


class LatestRuns:
    """The latest of every part: what the next commit writes again with its own, and what reading
    on needs.
    """

    def __init__(self, catalog: Catalog, document: Document, keep: int) -> None:
        """Of a document of which, of layers without memory, the blocks from `keep` on are stored.
        Raises CorruptMemory.
        """
        signature, table, blocks = catalog.signature, catalog.runs, document.blocks
        self._kinds = table.parts(document.layers_of(signature))
        of_layers = table.spec is None
        self._other = set(document.other_layers(signature)) if of_layers else set[int]()
        self._pieces: dict[int, list[Run]] = {}  # that follow each other
        with catalog.database.read() as txn:
            for part, kind in self._kinds.items():
                oldest = run_of(kind, blocks)
                if of_layers:
                    oldest = min(oldest, keep)
                firsts = range(run_of(kind, oldest), blocks, RUN_BLOCKS[kind])
                runs = [table.run(txn, document.id, part, first) for first in firsts]
                self._pieces[part] = [run for run in runs if run is not None]
                needed = keep if part in self._other else oldest
                if self._count(part, needed, blocks) != blocks - needed:
                    raise CorruptMemory(
                        f"{kind} landmarks of document {document.name!r} before block {blocks}, "
                        f"part {part}, are missing; run verify"
                    )

    def add(self, chunk: Chunk, committed: int, keep: int) -> None:
        """Remember what is kept of a chunk's blocks, and forget what is no longer needed once
        `committed` blocks are; keep: as in __init__.
        """
        for part, run in chunk.runs.items():
            first = min(run_of(self._kinds[part], committed), keep)
            # A new list: the committing thread may be reading the old one.
            kept = dropwhile(lambda piece: piece.end_block <= first, self._pieces[part])  # noqa: B023 (read now)
            self._pieces[part] = [*kept, run]

    def latest(self, part: int, first: int, end: int) -> Run | None:
        """What is remembered of blocks first .. end; None where that is nothing."""
        some = [
            run.cut(first, end)
            for run in self._pieces[part]
            if run.first_block < end and run.end_block > first
        ]
        return joined(some[0].first_block, some) if some else None

    def to_write(self, chunks: Sequence[Chunk], keep: int) -> Iterator[tuple[int, Run]]:
        """What a commit of these chunks writes: parts and runs."""
        begin, end = chunks[0].first_block, chunks[-1].end_block
        for part, kind in self._kinds.items():
            oldest = max(begin, keep) if part in self._other else begin
            if oldest == end:
                continue
            for first in range(run_of(kind, oldest), end, RUN_BLOCKS[kind]):
                run = self.latest(part, first, min(first + RUN_BLOCKS[kind], end))
                assert run is not None
                yield part, run

    def _count(self, part: int, first: int, end: int) -> int:
        run = self.latest(part, first, end) if first < end else None
        return 0 if run is None else run.end_block - run.first_block


class Commits:
    """What of one document is stored, and what is on its way."""

    def __init__(
        self,
        catalog: Catalog,
        document: Document,
        *,
        replaces: Document | None,
        on_commit: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """document: its row as it is committed; replaces: the document that goes when this one is
        ready. on_commit: told, on the committing thread, the chunks that are stored now. Raises
        CorruptMemory.
        """
        self.row = document
        self.error: BaseException | None = None  # nothing is committed after it
        self._catalog, self._replaces, self._on_commit = catalog, replaces, on_commit
        self._other_layers = document.other_layers(catalog.signature)
        # first block that is stored of layers without memory
        self._keep = self.keep_from(document.blocks)
        self.runs = LatestRuns(catalog, document, self._keep)
        self.encoder = Encoder(catalog, document)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-writer")
        # those that may not be done, and their bytes
        self._submitted: deque[tuple[Future[None], int]] = deque()
        self._counting = threading.Lock()
        self.waiting_bytes = 0

    def keep_from(self, end: int) -> int:
        """First block that must be at hand to continue behind block `end`, a chunk's last."""
        return max(0, end - self.row.settings.top_k)

    def submit(self, chunks: Sequence[Chunk], size: int, *, final: bool = False) -> None:
        """Commit chunks of `size` bytes when they are encoded and what was submitted before is
        committed; final: and the document is ready.
        """
        with self._counting:
            self.waiting_bytes += size
            self._submitted.append((self._thread.submit(self._run, chunks, final), size))

    def wait_for_one(self) -> None:
        """Wait for the oldest; its error is in `error`. Of one thread only."""
        future, size = self._submitted[0]
        future.exception()
        with self._counting:
            self._submitted.popleft()
            self.waiting_bytes -= size

    def wait(self) -> None:
        """Wait for all that was submitted until now, from any thread."""
        with self._counting:
            submitted = list(self._submitted)
        for future, _ in submitted:
            future.exception()

    def check(self) -> None:
        """Raises what committing or encoding raised."""
        while self._submitted and self._submitted[0][0].done():
            self.wait_for_one()
        if self.error is not None:
            raise self.error

    def leave_nothing(self) -> None:
        """Of a document that there was no room for: its row would be taken for a beginning."""
        document, catalog = self.row.id, self._catalog

        def work(txn: Transaction) -> None:
            # As it is stored: a commit may stand whose room could not be given back behind it.
            row = catalog.row(txn, document)
            if row is not None and not row.blocks and row.state != "ready":
                catalog.delete_document(txn, document)

        if isinstance(self.error, StorageFull):
            with suppress(StorageFull):
                catalog.database.write(work, beyond_limit=True)

    def close(self) -> None:
        """Wait for what was submitted, and end the threads."""
        self.encoder.close()
        self._thread.shutdown(wait=True)

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
        keep = end if final else self.keep_from(end)  # nobody reads on behind a finished document
        records = [record for chunk in chunks for record in self._records(chunk, keep)]
        records.sort(key=lambda record: record[:2])
        runs = list(self.runs.to_write(chunks, keep)) if chunks else []
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
            for part, run in runs:
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

    def _refer(self, txn: Transaction, chunk: Chunk) -> int:
        """Count the references to a chunk's passages, and store those that are not; the bytes of
        their records. Who was there first stays.
        """
        catalog, size = self._catalog, 0
        rows = catalog.refer(txn, self.row, chunk.first_block, chunk.digests)
        layers = self.row.layers_of(catalog.signature)
        for number, row in enumerate(rows):
            if not row.bytes:  # it may stand in the chunk more than once
                row = catalog.passages.row(txn, row.number) or row
            if not row.bytes and (number, layers[0]) in chunk.records:
                records = {layer: chunk.records[number, layer] for layer in layers}
                row = catalog.passages.store(txn, row, records)
            size += row.bytes
        return size

    def _records(self, chunk: Chunk, keep: int) -> list[tuple[int, int, bytes]]:
        """(block, layer, record) of what is stored of a chunk, but for its passages."""
        assert chunk.encoding is not None
        chunk.encoding.result()  # or its error, which is this commit's: what came before is stored
        self.encoder.add_records(chunk, self._other_layers, keep)
        if chunk.digests:
            return []
        return [
            (block, layer, record)
            for (block, layer), record in chunk.records.items()
            if block >= keep or layer not in self._other_layers
        ]


class Staged:
    """In order; from any thread."""

    def __init__(self, commits: Commits, commit_bytes: int) -> None:
        """commit_bytes: of a commit."""
        self._commits, self._commit_bytes = commits, commit_bytes
        self._lock = threading.Lock()  # of the next two
        self._chunks: list[Chunk] = []
        self._bytes = 0

    def add(self, chunk: Chunk, size: int) -> None:
        """Take the next one, which makes a commit larger by so many bytes."""
        with self._lock:
            self._chunks.append(chunk)
            self._bytes += size

    def submit_if_enough(self) -> None:
        """Give them to a commit once they are as much as one takes, and wait where storage is far
        behind. Raises what committing raised.
        """
        if self._bytes >= self._commit_bytes:
            self.submit()
        while self._commits.waiting_bytes > 2 * self._commit_bytes:
            self._commits.wait_for_one()
        self._commits.check()

    def submit(self, *, final: bool = False) -> None:
        """Give the whole ones to a commit, or all with the document's end."""
        with self._lock:
            chunks = [chunk for chunk in self._chunks if chunk.whole or final]
            self._chunks = [chunk for chunk in self._chunks if not (chunk.whole or final)]
            size, self._bytes = self._bytes, 0
            if chunks or final:
                self._commits.submit(chunks, size, final=final)

    def clear(self) -> None:
        """Let them go."""
        with self._lock:
            self._chunks = []
