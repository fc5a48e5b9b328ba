"""Uploads documents of a memory: reads and checks what is not published yet, and adds it to
segments.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.keys import document_range, run_range, tokens_key
from memstore.disk.format.record import WriteId
from memstore.disk.format.text_parts import Keep
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import StoredPassage
from memstore.errors import CorruptMemory, InvalidInput
from memstore.share.manifest import Entry
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Kind, Piece, Value, ValueHead, read_heads, record_pieces
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
        if not document.of_passages:
            self._send_blocks(document, old)
        elif self._keep == "kv":
            first = 0
            while first < document.blocks:
                first = self._add_passages(document, first)
        elif old is not None and record_pieces(old.pieces):
            old = None  # reused tokens would keep the segments of keys and values alive
        kinds: list[tuple[Kind, int]] = [("landmarks", part) for part in self._parts(document)]
        for kind, part in [*kinds, ("tokens", 0)]:
            values = self._values(document, kind, part)
            same: list[Piece] = [] if old is None else self._same(old, kind, part, values)
            self._sending.reuse(document.name, same)
            rest = values[sum(piece.take for piece in same) :]
            self._sending.add_values(document.name, kind, part, rest)

    def _parts(self, document: Document) -> list[int]:
        """The parts of a document's landmarks, as they are published."""
        runs = self._catalog.runs
        return list(runs.parts(document.layers_of(self._catalog.signature)))

    def _send_blocks(self, document: Document, old: Entry | None) -> None:
        first = 0
        for piece in _reused(document, old):
            self._send_records(document, first, piece.first)
            self._sending.reuse(document.name, [piece])
            first = piece.first + piece.take
        self._send_records(document, first, document.blocks)

    def _send_records(self, document: Document, first: int, end: int) -> None:
        for write, low, high in _by_write(document, first, end):
            while low < high:
                low = self._add_records(document, write, low, high)

    def _add_records(self, document: Document, write: WriteId, first: int, end: int) -> int:
        """Add blocks to the segment until it is full; return the first that is not in it."""
        catalog = self._catalog
        signature = catalog.signature
        starts = document.first_blocks(signature)
        layers = document.layers_of(signature)
        records: list[bytes] = []
        sizes: list[list[int]] = []
        full = self._sending.room
        held, block = 0, first - 1
        with catalog.database.read() as txn:
            self._check_unchanged(txn, document)
            walked = catalog.blocks.walk(txn, document.id, first)
            for at, some in groupby(walked, key=lambda record: record.key.block):
                if at >= end or (sizes and held >= full):
                    break
                _expect_block(document, at, block)
                block = at
                sizes.append([0] * len(layers))
                for key, view in some:
                    catalog.blocks.check(view, key, write)
                    sizes[-1][layers.index(key.layer)] = len(view)
                    records.append(bytes(view))
                    held += len(view)
        for at, found in enumerate(sizes):
            for layer, size in zip(layers, found):
                if not size and first + at >= starts.get(layer, 0):
                    raise _missing(document, f"block {first + at}, layer {layer}")
        if not sizes:
            raise _missing(document, f"block {first}")
        table = np.array(sizes, dtype=np.uint32)
        self._sending.add_records(document.name, [write], first, layers, table, records)
        return first + len(sizes)

    def _add_passages(self, document: Document, first: int) -> int:
        """Refer to passages from `first` on: those that are not there go into a run, as many as the
        segment has room for. Return the first that is left.
        """
        catalog, runs, run = self._catalog, self._sending.runs, Run()
        layers, full = document.layers_of(catalog.signature), self._sending.room
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
                    runs.add(passage.digest, run, self._records(txn, document, at, passage))
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

    def _records(
        self, txn: Transaction, document: Document, block: int, passage: StoredPassage
    ) -> list[bytes]:
        """The records of a passage, checked, in order of layers. Raises CorruptMemory."""
        blocks, found = self._catalog.blocks, dict[int, bytes]()
        for key, view in blocks.walk(txn, passage.number):
            blocks.check(view, key, passage.digest)
            found[key.layer] = bytes(view)
        layers = document.layers_of(self._catalog.signature)
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
        needed = kind == "tokens" or part in catalog.signature.memory_layers
        if not values and document.blocks and (needed or catalog.selector is not None):
            raise _missing(document, f"{kind} {part}")
        return values

    def _same(self, old: Entry, kind: Kind, part: int, values: Sequence[Value]) -> list[Piece]:
        """The published pieces that hold the same values, up to the first that differs."""
        heads = [ValueHead.of(value) for value in values]
        same: list[Piece] = []
        at = 0
        for piece in old.pieces:
            if (piece.kind, piece.part) != (kind, part):
                continue
            published = read_heads(self._objects, piece)
            count = 0
            while count < len(published) and heads[at : at + 1] == [published[count]]:
                count, at = count + 1, at + 1
            if count:
                same.append(piece._replace(take=count))
            if count < len(published):
                break
        return same

    def _check_unchanged(self, txn: Transaction, document: Document) -> None:
        if self._catalog.row(txn, document.id) != document:
            raise InvalidInput(
                f"document {document.name!r} changed while it was published; publish it again"
            )


def _by_write(document: Document, first: int, end: int) -> Iterator[tuple[WriteId, int, int]]:
    """The writes of blocks `first` to `end`, each with its blocks."""
    ends = [*(write.first for write in document.writes[1:]), document.blocks]
    for write, high in zip(document.writes, ends):
        low, high = max(first, write.first), min(end, high)
        if low < high:
            yield write.id, low, high


def _reused(document: Document, old: Entry | None) -> Iterator[Piece]:
    """The published records that a document still has, in order of blocks."""
    if old is None:
        return
    ends = {write: (low, high) for write, low, high in _by_write(document, 0, document.blocks)}
    for piece in record_pieces(old.pieces):
        first, end = piece.first, piece.first + piece.take
        low, high = ends.get(old.row.write_of(first), (0, 0))
        if low <= first < high:
            yield piece._replace(take=min(end, high) - first)


def _expect_block(document: Document, found: int, last: int) -> None:
    if found != last + 1:
        raise _missing(document, f"block {last + 1}")


def _missing(document: Document, what: str) -> CorruptMemory:
    return CorruptMemory(f"document {document.name!r} lacks {what}; run verify")
