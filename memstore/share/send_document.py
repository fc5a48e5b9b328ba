"""Uploads documents of a memory: reads and checks what is not published yet, and adds it to
segments.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.keys import document_range, run_range, tokens_key
from memstore.disk.format.record import WriteId
from memstore.disk.format.text_parts import Keep
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.block_table import StoredRecord
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import StoredPassage
from memstore.errors import CorruptMemory, InvalidInput
from memstore.share.manifest import Entry
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Kind, Piece, Value, record_pieces
from memstore.share.segments import Run, SegmentWriter


class DocumentPublisher:
    """Uploads documents of a memory, one after the other."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        sending: SegmentWriter,
        *,
        keep: Keep,
        others: Sequence[Entry],
    ) -> None:
        """keep: "text" for no records of passages. others: published documents of this memory, to
        look for passages in that several documents have.
        """
        self._catalog, self._objects, self._sending = catalog, objects, sending
        self._keep, self._others = keep, others

    def add(self, document: Document, old: Entry | None) -> None:
        """Upload missing pieces of a document; old: its published version. Raises InvalidInput (it
        changed while it was published), CorruptMemory, StoreUnavailable.
        """
        same: Sequence[Piece] = ()
        if old is not None and old.row.write == document.write:
            same = old.pieces
        if not document.of_passages:
            self._send_blocks(document, record_pieces(same))
        elif self._keep == "kv":
            first = 0
            while first < document.blocks:
                first = self._add_passages(document, first)
        elif record_pieces(same):
            same = ()  # reused tokens would keep the segments of keys and values alive
        parts = self._catalog.runs.parts(document.memory_layers(self._catalog.signature))
        kinds: list[tuple[Kind, int]] = [("landmarks", part) for part in parts]
        for kind, part in [*kinds, ("tokens", 0)]:
            there = [piece for piece in same if (piece.kind, piece.part) == (kind, part)]
            values = self._values(document, kind, part)
            if sum(piece.take for piece in there) == len(values):  # none is damaged
                self._sending.reuse(document.name, there)
            else:
                self._sending.add_values(document.name, kind, part, values)

    def _send_blocks(self, document: Document, same: Sequence[Piece]) -> None:
        """Upload blocks; same: the published pieces of them, in order."""
        first = 0
        for piece in same:
            self._send_records(document, first, piece.first)
            self._sending.reuse(document.name, [piece])
            first = piece.first + piece.take
        self._send_records(document, first, document.blocks)

    def _send_records(self, document: Document, first: int, end: int) -> None:
        while first < end:
            first = self._add_records(document, first, end)

    def _add_records(self, document: Document, first: int, end: int) -> int:
        """Add blocks to the segment until it is full; return the first that is not in it."""
        catalog, full = self._catalog, self._sending.room
        layers = document.memory_layers(catalog.signature)
        records: list[bytes] = []
        sizes: list[list[int]] = []
        held, block = 0, first - 1
        with catalog.database.read() as txn:
            self._check_unchanged(txn, document)
            walked = catalog.blocks.walk(txn, document.id, first)
            for at, some in groupby(walked, key=lambda record: record.key.block):
                if at >= end or (sizes and held >= full):
                    break
                _expect_block(document, at, block)
                block = at
                found = self._checked(some, document, block, document.write)
                records += found
                sizes.append(list(map(len, found)))
                held += sum(sizes[-1])
        if not sizes:
            raise _missing(document, f"block {first}")
        table = np.array(sizes, dtype=np.uint32)
        self._sending.add_records(document.name, [document.write], first, layers, table, records)
        return first + len(sizes)

    def _add_passages(self, document: Document, first: int) -> int:
        """Refer to passages from `first` on: those that are not there go into a run, as many as the
        segment has room for. Return the first that is left.
        """
        catalog, runs, run = self._catalog, self._sending.runs, Run()
        layers, full = document.memory_layers(catalog.signature), self._sending.room
        block = first - 1
        with catalog.database.read() as txn:
            self._check_unchanged(txn, document)
            for at, passage in catalog.passages_of(txn, document, first):
                if run.digests and run.size >= full:
                    break
                _expect_block(document, at, block)
                block = at
                there = self._knows(passage)
                if not there and passage.bytes:
                    walked = catalog.blocks.walk(txn, passage.number)
                    found = self._checked(walked, document, at, passage.digest)
                    runs.add(passage.digest, run, found)
                if there or passage.bytes:
                    runs.refer(document.name, at, passage.digest)
        if block < first:
            raise _missing(document, f"block {first}")
        self._sending.add_run(run, layers)
        return block + 1

    def _knows(self, passage: StoredPassage) -> bool:
        """Is a passage uploaded, or about to be?"""
        runs = self._sending.runs
        if not runs.knows(passage.digest) and passage.references > 1:
            others, self._others = self._others, ()
            runs.learn(others)
        return runs.knows(passage.digest)

    def _checked(
        self, records: Iterable[StoredRecord], document: Document, block: int, write: WriteId
    ) -> list[bytes]:
        """The records of a block, checked, in order of layers. Raises CorruptMemory."""
        found = dict[int, bytes]()
        for key, view in records:
            self._catalog.blocks.check(view, key, write)
            found[key.layer] = bytes(view)
        layers = document.memory_layers(self._catalog.signature)
        for layer in layers:
            if layer not in found:
                raise _missing(document, f"block {block}, layer {layer}")
        return [found[layer] for layer in layers]

    def _values(self, document: Document, kind: Kind, part: int) -> list[Value]:
        """The values of a kind in the memory, as they are published."""
        catalog, number = self._catalog, document.id
        low, high = run_range(number, part)
        if kind == "tokens":
            low, high = tokens_key(number, 0), document_range(number + 1)[0]
        values = []
        with catalog.database.read() as txn:
            self._check_unchanged(txn, document)
            for key, value in txn.scan_checked(kind, low, high):
                suffix = bytes(key)[8:]
                first = int.from_bytes(suffix[2:6] if kind == "landmarks" else suffix, "big")
                if kind == "landmarks":
                    suffix = part.to_bytes(2, "big") + suffix[2:]
                values.append(Value(first, suffix, bytes(value)))
        if not values and document.blocks:
            raise _missing(document, f"{kind} {part}")
        return values

    def _check_unchanged(self, txn: Transaction, document: Document) -> None:
        if self._catalog.row(txn, document.id) != document:
            raise InvalidInput(
                f"document {document.name!r} changed while it was published; publish it again"
            )


def _expect_block(document: Document, found: int, last: int) -> None:
    if found != last + 1:
        raise _missing(document, f"block {last + 1}")


def _missing(document: Document, what: str) -> CorruptMemory:
    return CorruptMemory(f"document {document.name!r} lacks {what}; run verify")
