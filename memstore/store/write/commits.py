"""The transactions that a document is written by: whole chunks each, in order, on a thread of its
own. Transactions of several documents interleave; each of them is all there or not at all.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from memstore.block import RecordKey
from memstore.disk.format.document import Document, State
from memstore.disk.format.runs import RUN_BLOCKS, run_of
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import StorageFull
from memstore.store.write.chunk import Chunk
from memstore.store.write.encode import Encoder
from memstore.store.write.latest_runs import LatestRuns

Tail = tuple[int, str]
"""Characters of a document of passages up to the end of its last, and the text behind."""


class Commits:
    """What of one document is stored, and what is on its way."""

    def __init__(
        self,
        catalog: Catalog,
        document: Document,
        *,
        blocks: int,
        tokens: int,
        replaces: Document | None,
        on_commit: Callable[[Sequence[Chunk], bool], None],
    ) -> None:
        """document: its row as it is committed, with the write that makes its next blocks; blocks,
        tokens: how many of its blocks stay, and of how many tokens; replaces: the document that
        goes when this one is ready.

        on_commit: told, on the committing thread, the chunks that are stored now, and whether they
        took the place of old blocks. Raises CorruptMemory.
        """
        self.row = document
        # the blocks from `base` on are old ones, that the first commit replaces
        self.cut, self.base, self.base_tokens = blocks < document.blocks, blocks, tokens
        self.error: BaseException | None = None  # nothing is committed after it
        self._catalog, self._replaces, self._on_commit = catalog, replaces, on_commit
        self._other_layers = document.other_layers(catalog.signature)
        # first block that is stored of layers without memory
        self._keep = self.keep_from(blocks)
        # as an append that is committed in part is read anew to its end
        self._unfinished: State = "ingesting" if document.state == "ready" else document.state
        self.runs = LatestRuns(catalog, document, blocks, self._keep)
        self.encoder = Encoder(catalog, document)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-writer")
        # those that may not be done, and their bytes
        self._submitted: deque[tuple[Future[None], int]] = deque()
        self._counting = threading.Lock()
        self.waiting_bytes = 0

    def keep_from(self, boundary: int) -> int:
        """First block that must be at hand to continue from a boundary of chunks."""
        return max(0, boundary - self.row.settings.top_k)

    def submit(
        self, chunks: Sequence[Chunk], size: int, *, final: bool = False, tail: Tail | None = None
    ) -> None:
        """Commit chunks of `size` bytes when they are encoded and what was submitted before is
        committed; final: and the document is ready, with its tail.
        """
        with self._counting:
            self.waiting_bytes += size
            self._submitted.append((self._thread.submit(self._run, chunks, final, tail), size))

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

    def _run(self, chunks: Sequence[Chunk], final: bool, tail: Tail | None) -> None:
        if self.error is not None:
            return  # nothing may follow what was not stored
        try:
            self._commit(chunks, final, tail)
        except BaseException as error:
            self.error = error
            raise

    def _commit(self, chunks: Sequence[Chunk], final: bool, tail: Tail | None) -> None:
        keep = max(self._keep, self.keep_from(chunks[-1].boundary)) if chunks else self._keep
        records = [record for chunk in chunks for record in self._records(chunk, keep)]
        records.sort(key=lambda record: record[:2])
        runs = list(self.runs.to_write(chunks, keep)) if chunks else []
        cut = self.cut and bool(chunks)
        replaces = self._replaces if final else None

        def work(txn: Transaction) -> Document:
            row, catalog = self.row, self._catalog
            number, size = row.id, row.bytes
            if cut:
                kept = {"blocks": self.base, "tokens": self.base_tokens}
                # of passages it may be more than they took: others store their records, too
                size = max(0, size - catalog.truncate_document(txn, number, **kept))
            size -= catalog.blocks.delete_layers(txn, number, self._other_layers, self._keep, keep)
            for block, layer, record in records:
                size += catalog.blocks.put(txn, RecordKey(number, block, layer), record)
            for chunk in chunks:
                size += self._refer(txn, chunk)
            for layer in self._other_layers:
                begin, end = (run_of("landmark", block) for block in (self._keep, keep))
                for first in range(begin, end, RUN_BLOCKS["landmark"]):
                    catalog.runs.delete_run(txn, number, layer, first)
            for part, run in runs:
                catalog.runs.put(txn, number, part, run)
            for chunk in chunks:
                catalog.put_part(txn, number, *chunk.part)
            if chunks:
                row = replace(row, blocks=chunks[-1].end_block, tokens=chunks[-1].end_token)
            if tail is not None:
                catalog.put_tail(txn, row, *tail)
            if replaces is not None:
                catalog.delete_document(txn, replaces.id)
            if final and row.of_passages:
                size = catalog.record_bytes(txn, row)
            row = replace(row, bytes=size, state="ready" if final else self._unfinished)
            catalog.put_document(txn, row)
            return row

        self.row = self._catalog.database.write(work, beyond_limit=replaces is not None)
        self._keep = keep
        if chunks:
            self._on_commit(chunks, cut)
        self.cut = False

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
        if chunk.encoding is not None:
            # or its error, which is this commit's: what comes before it is stored
            chunk.encoding.result()
        self.encoder.memory_layers(chunk)
        self.encoder.add_records(chunk, self._other_layers, keep)
        if chunk.digests:
            return []
        return [
            (block, layer, record)
            for (block, layer), record in chunk.records.items()
            if block >= keep or layer not in self._other_layers
        ]
