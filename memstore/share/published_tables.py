"""The tables of a publication as one manifest has it, which a PublishedCatalog reads. Records are
not among them: memstore.share.published_source reads those.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgpack

from memstore.disk.format.keys import read_run_key, run_key, tokens_key
from memstore.disk.lmdb.transaction import ValuePart
from memstore.disk.tables.catalog import FORMAT, Changes
from memstore.share.manifest import Manifest
from memstore.share.object_store import Extent
from memstore.share.piece_reader import Checked, PieceReader
from memstore.share.pieces import Entry, Piece, Value

LEAVING = 300.0  # seconds that an unpublished document stays: as long as an answer may take
_CHANGES = 4096  # that are remembered
_DOCUMENT = 8  # bytes of a document's number in a key


@dataclass(frozen=True)
class State:
    """The publication as one manifest has it, and unpublished documents that stay a while.

    A document has a number, which is its row's id, until it is replaced; no number is used twice.
    """

    manifest: Manifest
    published: Mapping[int, Entry]  # by number
    leaving: Mapping[int, tuple[Entry, float]]  # and until when each stays (time.monotonic)
    last: int  # the greatest number so far
    serial: int  # among the states of this process
    changes: Changes

    @classmethod
    def first(cls, manifest: Manifest) -> "State":
        """The state that a reader begins with."""
        none = cls(manifest, {}, {}, 0, 0, Changes(os.urandom(8), 1))
        return replace(none.next(manifest), changes=none.changes)

    def next(self, manifest: Manifest) -> "State":
        """The state of a manifest; it may be the same manifest."""
        now, last, old = time.monotonic(), self.last, self.published
        leaving = {n: stays for n, stays in self.leaving.items() if stays[1] > now}
        known = {**{n: entry for n, (entry, _) in leaving.items()}, **old}
        numbers = {(entry.row.name, entry.row.write): n for n, entry in known.items()}
        there: dict[int, Entry] = {}
        for entry in sorted(manifest.entries.values(), key=lambda e: (e.row.created, e.row.name)):
            number = numbers.get((entry.row.name, entry.row.write))
            if number is None:
                number = last = last + 1
            there[number] = entry._replace(row=replace(entry.row, id=number))
        leaving |= {n: (entry, now + LEAVING) for n, entry in old.items()}
        leaving = {n: stays for n, stays in leaving.items() if n not in there}
        changed = [n for n, entry in there.items() if old.get(n) != entry]
        changed += old.keys() - there.keys()
        series, count, latest = self.changes
        changes = Changes(series, count + len(changed), (*latest, *changed)[-_CHANGES:])
        return State(manifest, there, leaving, last, self.serial + 1, changes)

    def without_leaving(self) -> "State":
        """The same, without unpublished documents."""
        return replace(self, leaving={}).next(self.manifest)

    def entry(self, number: int) -> Entry | None:
        """A document, which may be unpublished and stay, or None."""
        return self.published.get(number) or self.leaving.get(number, (None, 0.0))[0]

    @property
    def has_left(self) -> bool:
        """Has an unpublished document stayed long enough?"""
        return any(until <= time.monotonic() for _, until in self.leaving.values())


class Snapshot:
    """A read transaction over the tables of landmarks and tokens, and the memory's description, of
    one State. Values from the object store are checked already.
    """

    def __init__(self, state: State, pieces: PieceReader) -> None:
        self.state, self._pieces = state, pieces
        self._held: dict[tuple[str, int], dict[bytes, bytes]] = {}  # that were read by `bring`

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None. Raises CorruptMemory, StoreUnavailable."""
        if table == "meta":
            return _description(self.state.manifest).get(key)
        return self._table(table, key).get(key)

    def scan_checked(
        self, table: str, start: bytes, end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of the document of `start`, from key `start` to before `end`, in order.
        Raises CorruptMemory, StoreUnavailable.
        """
        values = self._table(table, start)
        for key in sorted(values):
            if key >= start and (end is None or key < end):
                yield key, values[key]

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key of the same document that is not after `key`, or None."""
        return max((known for known in self._table(table, key) if known <= key), default=None)

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[bytes | memoryview] | None:
        """Parts of landmarks, all read at the same time; None where one has another size. Raises
        CorruptMemory, StoreUnavailable.
        """
        pieces = [piece for part in wanted if (piece := self._landmarks(part.key)) is not None]
        if len(pieces) < len(wanted):
            return None
        places = []
        for part, held in zip(wanted, self._pieces.tables(pieces)):
            name, offset, size = held.get(read_run_key(part.key)[2], Extent("", 0, 0))
            if size != part.size:
                return None
            places.append(Checked(Extent(name, offset + part.start, part.length), part.digest))
        return self._pieces.read(places)

    def _landmarks(self, key: bytes) -> Piece | None:
        """The piece that holds landmarks."""
        document, part, first = read_run_key(key)
        entry = self.state.entry(document)
        if entry is None:
            return None
        at = bisect_left(entry.pieces, ("landmarks", part, first + 1)) - 1
        found = entry.pieces[at] if at >= 0 else None
        return found if found is None or found[:2] == ("landmarks", part) else None

    def bring(self, documents: Sequence[int], table: str) -> None:
        """Read all of some documents' values of a table, at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        new = [(n, self.state.entry(n)) for n in documents if (table, n) not in self._held]
        wanted = [(n, [p for p in entry.pieces if p.kind == table]) for n, entry in new if entry]
        values = iter(self._pieces.values([piece for _, pieces in wanted for piece in pieces]))
        for number, pieces in wanted:
            self._held[table, number] = self._by_key(number, pieces, values)

    def _table(self, table: str, key: bytes) -> dict[bytes, bytes]:
        """All values of a table by key, of the document of a key."""
        number = _document(key)
        self.bring([number], table)
        return self._held.get((table, number), {})

    def _by_key(
        self, number: int, pieces: Iterable[Piece], values: Iterator[list[Value]]
    ) -> dict[bytes, bytes]:
        """Values of a document's pieces, taken from `values`, by their keys."""
        found = {}
        for piece in pieces:
            for first, value in next(values):
                if piece.kind == "tokens":
                    key = tokens_key(number, first)
                else:
                    key = run_key(number, piece.part, first)
                found[key] = value
        return found


def _document(key: bytes) -> int:
    return int.from_bytes(key[:_DOCUMENT], "big")


def _description(manifest: Manifest) -> dict[bytes, bytes]:
    """The description of the memory, as the tables of a directory have it."""
    selector = manifest.selector
    described = {
        "format": FORMAT,
        "signature": manifest.signature.to_dict(),
        "codec": manifest.codec,
        "created": manifest.created,
        "selector": None if selector is None else selector.to_dict(),
    }
    return {b"memory": msgpack.packb(described)}
