"""A publication as one manifest has it, as a transaction of a Catalog."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from memstore.disk.format.keys import document_key, read_passage_key, read_tokens_key
from memstore.disk.lmdb.transaction import ValuePart
from memstore.disk.tables.changes import Changes
from memstore.share.pieces import Piece, Value, piece_of
from memstore.share.read_pieces import Checked
from memstore.share.object_store import Extent
from memstore.share.held_pieces import HeldPieces
from memstore.share.published_states import PassagePlaces, State

_BLOCK = 8  # bytes of a document's number in a key

Parts = dict[bytes, bytes]  # values by key, of one document and table


class Snapshot:
    """A read transaction over the tables of one State. Unpublished documents that stay a while are
    found by their number alone.
    """

    writable = False

    def __init__(self, state: State, pieces: HeldPieces, places: PassagePlaces) -> None:
        self._state, self._pieces, self._places = state, pieces, places
        self._parts: dict[tuple[str, int], Parts] = {}  # that were read by `bring`

    def get(self, table: str, key: bytes) -> bytes | None:
        """A row, or None."""
        if table == "documents":
            return self._state.rows.get(int.from_bytes(key, "big"))
        return self.get_checked(table, key)

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None; values from the object store are checked already."""
        if table == "meta":
            return self._state.meta.get(key)
        if table == "documents":
            return self.get(table, key)
        if table == "passages":
            return self._places.row(read_passage_key(key))
        return self._of(table, key, key).get(key)

    def all_checked(self, table: str, keys: Sequence[bytes]) -> list[bytes] | None:
        """Values of all keys; None where one is missing."""
        values = [value for key in keys if (value := self.get_checked(table, key)) is not None]
        return values if len(values) == len(keys) else None

    def view(self, table: str, key: bytes) -> memoryview | None:
        """The same."""
        value = self.get_checked(table, key)
        return None if value is None else memoryview(value)

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[bytes | memoryview] | None:
        """Parts of landmarks, all read at the same time; None where one has another size. Raises
        CorruptMemory, StoreUnavailable.
        """
        pieces = [self._piece(part.key) for part in wanted]
        there = [piece for piece in pieces if piece is not None]
        if len(there) < len(wanted):
            return None
        places = []
        for part, table in zip(wanted, self._pieces.tables(there, len(wanted[0].key) - _BLOCK)):
            offset, size = table.places.get(_first(part.key), (0, 0))
            if size != part.size:
                return None
            extent = Extent(table.segment, offset + part.start, part.length)
            places.append(Checked(extent, part.digest))
        return self._pieces.landmarks(places)

    def _piece(self, key: bytes) -> Piece | None:
        """The piece that holds landmarks."""
        entry = self._state.entries.get(int.from_bytes(key[:_BLOCK], "big"))
        if entry is None:
            return None
        part = int.from_bytes(key[_BLOCK : _BLOCK + 2], "big")
        at = bisect_left(entry.pieces, ("landmarks", part, _first(key) + 1)) - 1
        found = entry.pieces[at] if at >= 0 else None
        return found if found is None or found[:2] == ("landmarks", part) else None

    def scan_checked(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from key `start` to before `end`, in order; of documents' values, those
        of the document of `start`.
        """
        if table == "documents":
            for number in sorted(self._state.rows.keys() - self._state.leaving.keys()):
                key = document_key(number)
                if key >= start and (end is None or key < end):
                    yield key, self._state.rows[number]
            return
        parts = self._of(table, start, end)
        for key in sorted(parts):
            if key >= start and (end is None or key < end):
                yield key, parts[key]

    scan = scan_checked

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key of the same document that is not after `key`, or None."""
        return max((known for known in self._of(table, key, key) if known <= key), default=None)

    def ahead(self, table: str, start: bytes, end: bytes | None) -> Iterator[None]:
        """Nothing: all values of a document are read with the first."""
        return iter(())

    @property
    def changes(self) -> Changes:
        """The documents whose rows changed last."""
        return self._state.changes

    @property
    def leaving(self) -> list[int]:
        """Unpublished documents that stay a while."""
        return list(self._state.leaving)

    def has_records(self, document: int, block: int) -> bool:
        """Are keys and values published of a document's block?"""
        entry = self._state.entries.get(document)
        return entry is not None and piece_of(entry.pieces, block) is not None

    def bring(self, documents: Sequence[int], table: str) -> None:
        """Read all of some documents' values of a table, at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        new = [n for n in documents if (table, n) not in self._parts and n in self._state.entries]
        values = self._values(new, lambda pieces: [p for p in pieces if p.kind == table])
        for number, found in zip(new, values):
            start = document_key(number)
            self._parts[table, number] = {start + v.key: v.value for v in found}

    def _of(self, table: str, start: bytes, end: bytes | None) -> Parts:
        number = int.from_bytes(start[:_BLOCK], "big")
        held = self._parts.get((table, number))
        entry = self._state.entries.get(number)
        if held is not None or entry is None:
            return held or {}
        if table != "tokens":
            self.bring([number], table)
            return self._parts[table, number]
        # Only some tokens are wanted: read the pieces that may hold them.
        first = read_tokens_key(start)[1] if len(start) > _BLOCK else 0
        last = read_tokens_key(end)[1] if end is not None and len(end) > _BLOCK else 1 << 64

        def passage(pieces: Iterable[Piece]) -> list[Piece]:
            tokens = [piece for piece in pieces if piece.kind == "tokens"]
            least = max((p.first for p in tokens if p.first <= first), default=0)
            return sorted(
                (p for p in tokens if least <= p.first <= last), key=lambda piece: piece.first
            )

        (values,) = self._values([number], passage)
        prefix = document_key(number)
        return {prefix + v.key: v.value for v in values}

    def _values(
        self, numbers: Sequence[int], choose: Callable[[Iterable[Piece]], Sequence[Piece]]
    ) -> list[list[Value]]:
        """The values of some of the pieces of each of these documents. Raises CorruptMemory,
        StoreUnavailable.
        """
        chosen = [choose(self._state.entries[number].pieces) for number in numbers]
        values = iter(self._pieces.values([piece for some in chosen for piece in some]))
        return [[v for _ in some for v in next(values)] for some in chosen]


def _first(key: bytes) -> int:
    """The first block of landmarks, from their key."""
    return int.from_bytes(key[_BLOCK + 2 : _BLOCK + 6], "big")
