"""The tables of a publication as one manifest has it, which a PublishedCatalog reads. Records are
not among them: memstore.share.published_source reads those.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgpack

from memstore.disk.format.keys import read_tokens_key, run_key, tokens_key
from memstore.disk.lmdb.transaction import ValuePart
from memstore.disk.tables.catalog import FORMAT
from memstore.disk.tables.changes import Changes
from memstore.share.entries import Entry
from memstore.share.manifest import Manifest
from memstore.share.object_store import Extent
from memstore.share.piece_reader import Checked, PieceReader
from memstore.share.pieces import Piece, Value

LEAVING = 300.0  # seconds that an unpublished document stays: as long as an answer may take
_CHANGES = 4096  # that are remembered
_BLOCK = 8  # bytes of a document's number in a key


@dataclass(frozen=True)
class State:
    """The publication as one manifest has it, and unpublished documents that stay a while.

    A document has a number, which is its row's id, until it is replaced; no number is used twice.
    """

    manifest: Manifest
    entries: Mapping[int, Entry]  # by number, also unpublished documents that stay
    leaving: Mapping[int, float]  # until when unpublished documents stay (time.monotonic)
    last: int  # the greatest number so far
    serial: int  # among the states of this process
    changes: Changes

    @classmethod
    def first(cls, manifest: Manifest, entries: Iterable[Entry]) -> "State":
        """The state that a reader begins with."""
        none = cls(manifest, {}, {}, 0, 0, Changes(os.urandom(8), 1))
        made = none.next(manifest, entries)
        return replace(made, changes=none.changes)

    def next(self, manifest: Manifest, entries: Iterable[Entry]) -> "State":
        """The state of a manifest with these documents; it may be the same manifest."""
        now, last = time.monotonic(), self.last
        numbers = {(e.row.name, e.row.write): number for number, e in self.entries.items()}
        there: dict[int, Entry] = {}
        for entry in sorted(entries, key=lambda entry: (entry.row.created, entry.row.name)):
            number = numbers.get((entry.row.name, entry.row.write))
            if number is None:
                number = last = last + 1
            there[number] = entry._replace(row=replace(entry.row, id=number))
        leaving = {n: until for n, until in self.leaving.items() if until > now and n not in there}
        old = self.published
        leaving |= {n: now + LEAVING for n in old if n not in there}
        changed = [n for n, entry in there.items() if old.get(n) != entry]
        changed += old.keys() - there.keys()
        series, count, known = self.changes
        changes = Changes(series, count + len(changed), (*known, *changed)[-_CHANGES:])
        every = {**{n: self.entries[n] for n in leaving}, **there}
        return State(manifest, every, leaving, last, self.serial + 1, changes)

    def again(self, *, drop: bool = False) -> "State":
        """The same manifest's, without documents that stayed long enough; drop: without any that
        are unpublished, since their objects are gone.
        """
        leaving = dict.fromkeys(self.leaving, 0.0) if drop else self.leaving
        return replace(self, leaving=leaving).next(self.manifest, self.published.values())

    @property
    def published(self) -> dict[int, Entry]:
        """The published documents by number."""
        return {n: entry for n, entry in self.entries.items() if n not in self.leaving}

    @property
    def has_left(self) -> bool:
        """Has an unpublished document stayed long enough?"""
        return min(self.leaving.values(), default=float("inf")) <= time.monotonic()


class Snapshot:
    """A read transaction over the tables of landmarks and tokens, and the memory's description, of
    one State. Values from the object store are checked already.
    """

    writable = False

    def __init__(self, state: State, pieces: PieceReader) -> None:
        self.state, self._pieces = state, pieces
        self._held: dict[tuple[str, int], dict[bytes, bytes]] = {}  # that were read by `bring`

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None. Raises CorruptMemory, StoreUnavailable."""
        if table == "meta":
            return _description(self.state.manifest).get(key)
        return self._table(table, key, key).get(key)

    def scan_checked(
        self, table: str, start: bytes, end: bytes | None = None, *, ahead: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of the document of `start`, from key `start` to before `end`, in order.
        ahead: without effect; all values of a document are read with the first. Raises
        CorruptMemory, StoreUnavailable.
        """
        values = self._table(table, start, end)
        for key in sorted(values):
            if key >= start and (end is None or key < end):
                yield key, values[key]

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key of the same document that is not after `key`, or None."""
        return max((known for known in self._table(table, key, key) if known <= key), default=None)

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[bytes | memoryview] | None:
        """Parts of landmarks, all read at the same time; None where one has another size. Raises
        CorruptMemory, StoreUnavailable.
        """
        pieces = [piece for part in wanted if (piece := self._landmarks(part.key)) is not None]
        if len(pieces) < len(wanted):
            return None
        places = []
        for part, held in zip(wanted, self._pieces.tables(pieces)):
            name, offset, size = held.get(_first_block(part.key), Extent("", 0, 0))
            if size != part.size:
                return None
            places.append(Checked(Extent(name, offset + part.start, part.length), part.digest))
        return self._pieces.read(places)

    def _landmarks(self, key: bytes) -> Piece | None:
        """The piece that holds landmarks."""
        entry = self.state.entries.get(_document(key))
        if entry is None:
            return None
        part = int.from_bytes(key[_BLOCK : _BLOCK + 2], "big")
        at = bisect_left(entry.pieces, ("landmarks", part, _first_block(key) + 1)) - 1
        found = entry.pieces[at] if at >= 0 else None
        return found if found is None or found[:2] == ("landmarks", part) else None

    def bring(self, documents: Sequence[int], table: str) -> None:
        """Read all of some documents' values of a table, at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        entries = self.state.entries
        new = [n for n in documents if (table, n) not in self._held and n in entries]
        wanted = [[piece for piece in entries[n].pieces if piece.kind == table] for n in new]
        values = iter(self._pieces.values([piece for pieces in wanted for piece in pieces]))
        for number, pieces in zip(new, wanted):
            self._held[table, number] = self._by_key(number, pieces, values)

    def _table(self, table: str, start: bytes, end: bytes | None) -> dict[bytes, bytes]:
        """Values by key of the document of `start`: of landmarks all, of tokens those of the pieces
        that may have keys from `start` to `end`.
        """
        number = _document(start)
        if table != "tokens":
            self.bring([number], table)
        if (table, number) in self._held or number not in self.state.entries:
            return self._held.get((table, number), {})
        first = read_tokens_key(start)[1] if len(start) > _BLOCK else 0
        last = read_tokens_key(end)[1] if end is not None and len(end) > _BLOCK else 1 << 64
        pieces = [p for p in self.state.entries[number].pieces if p.kind == "tokens"]
        least = max((piece.first for piece in pieces if piece.first <= first), default=0)
        pieces = [piece for piece in pieces if least <= piece.first <= last]
        return self._by_key(number, pieces, iter(self._pieces.values(pieces)))

    def _by_key(
        self, number: int, pieces: Iterable[Piece], values: Iterator[list[Value]]
    ) -> dict[bytes, bytes]:
        """Values of a document's pieces, taken from `values`, by their keys."""
        of_selector = self.state.manifest.selector is not None
        found = {}
        for piece in pieces:
            for first, value in next(values):
                if piece.kind == "tokens":
                    key = tokens_key(number, first)
                else:
                    key = run_key(number, piece.part, first, of_selector=of_selector)
                found[key] = value
        return found


def _document(key: bytes) -> int:
    return int.from_bytes(key[:_BLOCK], "big")


def _first_block(key: bytes) -> int:
    """The first block of landmarks, from their key."""
    return int.from_bytes(key[_BLOCK + 2 : _BLOCK + 6], "big")


def _description(manifest: Manifest) -> dict[bytes, bytes]:
    """The description of the memory, as the tables of a directory have it."""
    selector = manifest.selector
    described = {
        "format": FORMAT,
        "signature": manifest.signature.to_dict(),
        "codec": manifest.codec,
        "created": manifest.created,
        "quota": None,
        "selector": selector is not None,
    }
    meta = {b"memory": msgpack.packb(described)}
    if selector is not None:
        meta[b"selector"] = msgpack.packb(selector.to_dict())
    return meta
