"""Merging: what lies in many small segments, as publications of one small document each leave them,
is written into few large ones, and the next manifest names these.

Nothing of what is held changes, so readers of either manifest answer alike; the small segments stay
until `prune` removes them. What another publishes meanwhile is left as that publisher has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from memstore.block import RecordKey
from memstore.disk.blocks import BlockTable
from memstore.errors import CorruptBlock, ObjectNotFound, StoreUnavailable
from memstore.share.manifest import Change, Manifest, Published, commit
from memstore.share.pages import Entry
from memstore.share.pieces import Piece, RecordIndex, Value
from memstore.share.place import Place
from memstore.share.prune import GRACE
from memstore.share.reading import check_piece, damaged, index_of, values_of
from memstore.share.segments import FOLDER, SEGMENT_BYTES
from memstore.share.sending import Sending
from memstore.share.threads import at_once

_SMALL = 4  # a segment is small that is less than one part in so many of what it may be
_TOGETHER = 64 << 20  # bytes of small segments that are held at once, about


class Merged(NamedTuple):
    """What merging did."""

    number: int  # of the manifest that is the newest now
    documents: int  # that lie elsewhere now
    before: int  # small segments that were named
    after: int  # segments that were written in their place
    bytes: int  # of these


def merge(place: Place, *, grace: float = GRACE, segment_bytes: int = SEGMENT_BYTES) -> Merged:
    """Write what lies in small segments into few, if there are several.

    grace: seconds, that of `prune`. Raises MemoryNotFound, CorruptMemory (a record or value is
    damaged; nothing is changed), StoreUnavailable.
    """
    newest = Published.open(place)
    sizes = {found.name: found.size for found in place.names(FOLDER)}
    small = {name for name, size in sizes.items() if size < segment_bytes // _SMALL}
    manifest = newest.manifest
    old = {entry.row.name: entry for entry in newest.documents() if _lies_in(entry, small)}
    named = {piece.segment for entry in old.values() for piece in entry.pieces} & small
    if len(named) < 2:
        return Merged(manifest.number, 0, len(named), 0, 0)
    table = BlockTable(manifest.signature, manifest.codec)
    with Sending(place, manifest.signature.digest, limit=segment_bytes, grace=grace) as sending:
        for entries, data in _batches(place, list(old.values()), named, sizes):
            for entry in entries:
                _copy(place, table, entry, data, sending)
        sending.flush()
        pieces, sent = sending.pieces, sending.sent
    new = {
        name: entry._replace(
            pieces=tuple(
                sorted([*(p for p in entry.pieces if p.segment not in named), *pieces[name]])
            )
        )
        for name, entry in old.items()
    }
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
            raise StoreUnavailable(f"{place.url}: others prune what this merged; merge again")
        return now.manifest, Change(entries)

    published = commit(place, change)
    number = manifest.number if published is None else published.manifest.number
    return Merged(number, moved, len(named), len(sent), sum(sent))


def _lies_in(entry: Entry, segments: set[str]) -> bool:
    return any(piece.segment in segments for piece in entry.pieces)


def _batches(
    place: Place, entries: Sequence[Entry], named: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[list[Entry], dict[str, memoryview]]]:
    """Some entries at a time, with the small segments that they lie in."""

    def read(name: str) -> memoryview:
        try:
            return place.get(name, sizes[name])
        except ObjectNotFound as error:  # of an unpublished document, say, and pruned
            raise StoreUnavailable(f"{error}; others changed the memory, merge again") from error

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


def _copy(
    place: Place,
    table: BlockTable,
    entry: Entry,
    segments: Mapping[str, memoryview],
    sending: Sending,
) -> None:
    """Put the pieces of a document that lie in these segments into others."""

    def of(piece: Piece) -> memoryview:
        return segments[piece.segment][piece.offset : piece.offset + piece.length]

    for (kind, part), some in groupby(sorted(entry.pieces), key=lambda piece: piece[:2]):
        # neighbours among them become one piece
        for here, run in groupby(some, key=lambda piece: piece.segment in segments):
            if not here:
                continue
            if kind == "records":
                for piece in run:
                    index = index_of(place, entry, piece, of(piece))
                    _copy_records(place, table, entry, piece, index, segments, sending)
                continue
            values: list[Value] = []
            for piece in run:
                check_piece(place, piece, of(piece))
                values += values_of(place, piece, of(piece))
            sending.add_values(entry.row.name, kind, part, values)


def _copy_records(
    place: Place,
    table: BlockTable,
    entry: Entry,
    piece: Piece,
    index: RecordIndex,
    segments: Mapping[str, memoryview],
    sending: Sending,
) -> None:
    data = segments[piece.segment]
    records: list[memoryview] = []
    sizes: np.ndarray = index.sizes[: piece.take]
    for block in range(piece.first, piece.first + piece.take):
        for layer in index.layers:
            found = index.find(layer, block)
            if found is None:
                continue
            start, length = found
            records.append(data[start : start + length])
            try:
                if entry.row.of_passages:
                    table.check_as_told(records[-1], layer)
                else:
                    table.check(records[-1], RecordKey(entry.row.id, block, layer), index.write)
            except CorruptBlock as error:
                raise damaged(place, piece, error) from error
    sending.add_records(entry.row.name, index.write, piece.first, index.layers, sizes, records)
