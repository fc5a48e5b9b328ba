"""Merging: copies what is in many small segments, and what is used of large ones of which documents
use less than half, into few large segments, which the next manifest names.

Contents do not change, so readers of either manifest answer alike; `prune` removes the old
segments. Documents that another process publishes at the same time stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memstore.block import RecordKey
from memstore.disk.format.record import WriteId
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, ObjectNotFound, StoreUnavailable
from memstore.share.format.document_pages import Entry
from memstore.share.format.manifest import Manifest
from memstore.share.format.passage_runs import Run
from memstore.share.format.pieces import Piece, RecordIndex, Value, row_of
from memstore.share.format.published import Published
from memstore.share.format.read_pieces import check_piece, damaged, index_of, values_of
from memstore.share.format.segments import FOLDER, SEGMENT_BYTES, read_footer
from memstore.share.objects.daemon_threads import at_once
from memstore.share.objects.object_store import ObjectStore
from memstore.share.publish.garbage_collection import GRACE
from memstore.share.publish.manifest_commit import Change, commit
from memstore.share.publish.segment_writer import SegmentWriter

_SMALL = 4  # a segment below the limit divided by this is small
_TOGETHER = 64 << 20  # bytes of small segments that are held at once, about


class Merged(NamedTuple):
    """What merging did."""

    number: int  # of the manifest that is the newest now
    documents: int  # that were moved
    before: int  # small segments, and those of which less than half was used
    after: int  # segments that were written in their place
    bytes: int  # of these


def merge(
    objects: ObjectStore, *, grace: float = GRACE, segment_bytes: int = SEGMENT_BYTES
) -> Merged:
    """Copy what is in small segments, if there are several, and what is used of mostly unused ones.

    grace: seconds, that of `prune`. Raises MemoryNotFound, CorruptMemory (a record or value is
    damaged; nothing is changed), StoreUnavailable.
    """
    newest = Published.open(objects)
    sizes = {found.name: found.size for found in objects.names(FOLDER)}
    small = {name for name, size in sizes.items() if size < segment_bytes // _SMALL}
    manifest, entries = newest.manifest, newest.documents()
    wasted = _half_used(objects, entries, {n: sizes[n] for n in sizes.keys() - small})
    old = {entry.row.name: entry for entry in entries if _lies_in(entry, small | wasted)}
    named = {piece.segment for entry in old.values() for piece in entry.pieces} & (small | wasted)
    if len(named) < 2 and not wasted:
        return Merged(manifest.number, 0, len(named), 0, 0)
    sending = SegmentWriter(objects, manifest.signature.digest, limit=segment_bytes, grace=grace)
    copying = _Copying(objects, manifest, sending)
    for some, data in _batches(objects, list(old.values()), named, sizes):
        for entry in some:
            copying.copy(entry, data)
    sending.flush()
    sent = sending.sent
    new = {name: _moved(entry, named, sending.pieces(name)) for name, entry in old.items()}
    moved = 0

    def change(now: Published | None) -> tuple[Manifest, Change] | None:
        nonlocal moved
        if now is None:
            return None
        there = now.entries(list(old))
        entries = {name: new[name] for name, entry in there.items() if entry == old[name]}
        moved = len(entries)
        if not entries:
            return None
        if not sending.lasts():
            raise StoreUnavailable(
                f"{objects.url}: another process pruned what this one merged; merge again"
            )
        return now.manifest, Change(entries)

    published = commit(objects, change)
    number = manifest.number if published is None else published.manifest.number
    return Merged(number, moved, len(named), len(sent), sum(sent))


def _lies_in(entry: Entry, segments: set[str]) -> bool:
    return any(piece.segment in segments for piece in entry.pieces)


def _half_used(
    objects: ObjectStore, entries: Sequence[Entry], sizes: Mapping[str, int]
) -> set[str]:
    """The segments of which documents of passages use less than half of the bytes. Raises
    CorruptMemory, StoreUnavailable.
    """
    used: dict[str, dict[int, list[tuple[int, int]]]] = {}  # rows by segment and piece
    for entry in entries if any(entry.row.of_passages for entry in entries) else ():
        for piece in entry.pieces:
            if piece.segment in sizes:
                of = used.setdefault(piece.segment, {}).setdefault(piece.offset, [])
                of.append((piece.row, piece.row + piece.take))
    footers = at_once(lambda name: read_footer(objects, name, sizes[name])[1], list(used))
    return {
        name
        for (name, rows), pieces in zip(used.items(), footers)
        if 2 * _used_bytes(rows, pieces) < sizes[name]
    }


def _used_bytes(rows: Mapping[int, list[tuple[int, int]]], pieces: Sequence[Piece]) -> int:
    """About how many bytes of a segment documents use: part of a run counts by its rows. rows: that
    documents use, by offset of the piece.
    """
    used = end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        begin, end = end, piece.offset + piece.length  # records are before their index
        last = taken = 0
        for low, high in sorted(rows.get(piece.offset, ())):
            taken += max(0, high - max(low, last))
            last = max(last, high)
        part = taken > 0 if piece.kind != "records" else taken / max(1, piece.take)
        used += int((end - begin) * part)
    return used


def _moved(entry: Entry, segments: set[str], pieces: Sequence[Piece]) -> Entry:
    """A document with these pieces in place of those in some segments."""
    others = [piece for piece in entry.pieces if piece.segment not in segments]
    return entry._replace(pieces=tuple(sorted([*others, *pieces])))


def _batches(
    objects: ObjectStore, entries: Sequence[Entry], named: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[list[Entry], dict[str, memoryview]]]:
    """Some entries at a time, with the segments to copy that they are in."""

    def read(name: str) -> memoryview:
        try:
            return objects.get(name, sizes[name])
        except ObjectNotFound as error:  # of an unpublished document, say, and pruned
            raise StoreUnavailable(f"{error}; the publication changed, merge again") from error

    def segments(some: Sequence[Entry]) -> list[str]:
        wanted = {p.segment: None for entry in some for p in entry.pieces if p.segment in named}
        return list(wanted)

    batch: list[Entry] = []
    held: set[str] = set()  # segments of the batch
    size = 0  # of these
    for entry in [*entries, None]:
        if batch and (entry is None or size >= _TOGETHER):
            wanted = segments(batch)
            yield batch, dict(zip(wanted, at_once(read, wanted)))
            batch, held, size = [], set(), 0
        if entry is not None:
            batch.append(entry)
            new = {*segments([entry])} - held
            held |= new
            size += sum(sizes[name] for name in new)


class _Copying:
    """Copies pieces of documents into new segments, one document after the other."""

    def __init__(self, objects: ObjectStore, manifest: Manifest, sending: SegmentWriter) -> None:
        self._objects, self._sending, self._signature = objects, sending, manifest.signature
        self._table = BlockTable(manifest.signature, manifest.codec)

    def copy(self, entry: Entry, segments: Mapping[str, memoryview]) -> None:
        """Copy the pieces of a document that are in these segments."""
        for (kind, part), some in groupby(sorted(entry.pieces), key=lambda piece: piece[:2]):
            # neighbours among them become one piece
            for here, run in groupby(some, key=lambda piece: piece.segment in segments):
                if here and kind == "records" and entry.row.of_passages:
                    self._copy_passages(entry, list(run), segments)
                elif here and kind == "records":
                    for piece in run:
                        self._copy_records(entry, piece, segments)
                elif here:
                    values: list[Value] = []
                    for piece in run:
                        data = _data(piece, segments)
                        check_piece(self._objects, piece, data)
                        values += values_of(self._objects, piece, data)
                    self._sending.add_values(entry.row.name, kind, part, values)

    def _copy_records(self, entry: Entry, piece: Piece, segments: Mapping[str, memoryview]) -> None:
        index = index_of(self._objects, entry, piece, _data(piece, segments))
        data, records = segments[piece.segment], list[memoryview]()
        for block in range(piece.first, piece.first + piece.take):
            for layer in index.layers:
                found = index.find(layer, row_of(piece, block))
                if found is not None:
                    records.append(data[found[0] : found[0] + found[1]])
                    key = RecordKey(entry.row.id, block, layer)
                    self._check(piece, records[-1], key, index.writes[0])
        sizes = index.sizes[piece.row : piece.row + piece.take]
        self._sending.add_records(
            entry.row.name, index.writes, piece.first, index.layers, sizes, records
        )

    def _copy_passages(
        self, entry: Entry, pieces: Sequence[Piece], segments: Mapping[str, memoryview]
    ) -> None:
        """Copy records of passages, without those that another document brought already."""
        layers = entry.row.layers_of(self._signature)
        runs, run = self._sending.runs, Run()
        indexes: dict[tuple[str, int], RecordIndex] = {}
        for piece in pieces:
            data, where = segments[piece.segment], (piece.segment, piece.offset)
            if where not in indexes:
                indexes[where] = index_of(self._objects, entry, piece, _data(piece, segments))
            index = indexes[where]
            for block in range(piece.first, piece.first + piece.take):
                row = row_of(piece, block)
                digest = index.writes[row]
                if not runs.knows(digest):
                    records = []
                    for layer in layers:
                        start, length = index.find(layer, row) or (0, 0)
                        records.append(data[start : start + length])
                        self._check(piece, records[-1], RecordKey(0, 0, layer), digest)
                    runs.add(digest, run, records)
                runs.refer(entry.row.name, block, digest)
                if run.size >= self._sending.room:
                    self._sending.add_run(run, layers)
                    run = Run()
        self._sending.add_run(run, layers)

    def _check(self, piece: Piece, record: memoryview, key: RecordKey, write: WriteId) -> None:
        try:
            self._table.check(record, key, write)
        except CorruptBlock as error:
            raise damaged(self._objects, piece, error) from error


def _data(piece: Piece, segments: Mapping[str, memoryview]) -> memoryview:
    return segments[piece.segment][piece.offset : piece.offset + piece.length]
