"""Pieces of published documents for a reader: from main memory, the local cache or the object
store, each checked.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, StoreUnavailable
from memstore.share.calls import Failure
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import Extent
from memstore.share.pieces import (
    Piece,
    RecordIndex,
    Value,
    damaged,
    decode_table,
    index_of,
    table_bytes,
    values_of,
)
from memstore.share.remote import Remote, as_failure

K = TypeVar("K")
V = TypeVar("V")

_INDEXES, _TOKENS, _TABLES = 4096, 64, 1 << 16  # that are held in main memory


class Checked(NamedTuple):
    """Bytes of an object, and their XXH3-64."""

    extent: Extent
    digest: int


class RecordPlace(NamedTuple):
    """A record of a document, as its pieces tell where it is."""

    row: Document
    piece: Piece
    layer: int
    index_row: int


class PieceReader:
    """Pieces of an object store. May be used by several threads."""

    def __init__(self, remote: Remote, local: LocalCache | None) -> None:
        self._remote, self._local = remote, local
        self._indexes = _Recent[Checked, RecordIndex](_INDEXES)
        self._tokens = _Recent[Piece, list[Value]](_TOKENS)
        self._tables = _Recent[Piece, dict[int, Extent]](_TABLES)

    def values(self, pieces: Sequence[Piece]) -> list[list[Value]]:
        """The values of pieces, all missing ones read at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        held = self._tokens.find(pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]
        for piece, data in zip(missing, self.read(list(map(_checked, missing)))):
            held[piece] = values_of(self._remote.objects, piece, data)
        self._tokens.add({piece: held[piece] for piece in missing if piece.kind == "tokens"})
        return [held[piece] for piece in pieces]

    def tables(self, pieces: Sequence[Piece]) -> list[dict[int, Extent]]:
        """Where the values of pieces are, by the first number of each; read from the beginnings of
        the pieces alone, all missing ones at the same time. Raises CorruptMemory, StoreUnavailable.
        """
        held = self._tables.find(pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]

        def check(number: int, data: bytes | memoryview) -> None:
            piece = missing[number]
            try:
                places = decode_table(data, piece.take)
            except ValueError as error:
                raise damaged(self._remote.objects, piece, error) from error
            held[piece] = {
                first: Extent(piece.segment, piece.offset + at, size)
                for first, (at, size) in places.items()
            }

        begins = [Extent(p.segment, p.offset, min(p.length, table_bytes(p.take))) for p in missing]
        self._read(begins, check)
        self._tables.add(held)
        return [held[piece] for piece in pieces]

    def find(self, wanted: Sequence[RecordPlace], until: float) -> list[Extent | Failure | None]:
        """The bytes of records; None for a missing record, Failure where its index could not be
        read by `until` (time.monotonic).
        """
        pieces = {_checked(place.piece): place for place in wanted}
        indexes: dict[Checked, RecordIndex | Failure] = {**self._indexes.find(pieces)}
        missing = [which for which in pieces if which not in indexes]
        try:
            new = {
                which: index_of(self._remote.objects, pieces[which].row, pieces[which].piece, data)
                for which, data in zip(missing, self.read(missing, until))
            }
            self._indexes.add(new)
            indexes |= new
        except StoreUnavailable as error:  # of one: the caller may ask for one at a time
            indexes |= dict.fromkeys(missing, as_failure(error))
        except CorruptMemory as error:
            indexes |= dict.fromkeys(missing, Failure("damaged", str(error)))
        found: list[Extent | Failure | None] = []
        for _, piece, layer, row in wanted:
            index = indexes[_checked(piece)]
            if isinstance(index, RecordIndex):
                place = index.find(layer, row)
                found.append(None if place is None else Extent(piece.segment, *place))
            else:
                found.append(index)
        return found

    def read(
        self, wanted: Sequence[Checked], until: float | None = None
    ) -> list[bytes | memoryview]:
        """Bytes of objects, until then (time.monotonic; None: within the deadline). Raises
        CorruptMemory, StoreUnavailable.
        """

        def check(number: int, data: bytes | memoryview) -> None:
            (name, offset, length), digest = wanted[number]
            if xxh3_64_intdigest(data) != digest:
                raise CorruptMemory(
                    f"{self._remote.objects.url}: {length:,} bytes of {name} from {offset:,} on "
                    "are damaged (wrong checksum); run memstore verify, or publish the documents "
                    "again with --check"
                )

        return self._read([each.extent for each in wanted], check, until)

    def _read(
        self,
        extents: Sequence[Extent],
        check: Callable[[int, bytes | memoryview], None],
        until: float | None = None,
    ) -> list[bytes | memoryview]:
        """Bytes of extents from the local cache, and all missing ones from the object store at the
        same time. check: takes the number of an extent and bytes, and raises CorruptMemory where
        they are not its bytes.
        """
        found: dict[int, bytes | memoryview] = {}
        names = [_name(self._remote.objects.identity, extent) for extent in extents]
        if self._local is not None and extents:
            most = max(extent.length for extent in extents)
            for number, cached in enumerate(self._local.get_many(names, most)):
                if isinstance(cached, bytes):
                    try:
                        check(number, cached)
                        found[number] = cached
                    except CorruptMemory:
                        self._local.drop(names[number])
        missing = [number for number in range(len(extents)) if number not in found]

        def check_missing(number: int, data: memoryview) -> None:
            try:
                check(missing[number], data)
            except CorruptMemory as error:
                raise Failure("damaged", str(error)) from error

        if until is None:
            until = self._remote.until(sum(extents[number].length for number in missing))
        answers = self._remote.read([extents[number] for number in missing], check_missing, until)
        for number, answer in zip(missing, answers):
            if isinstance(answer, Failure):
                if answer.reason == "damaged":
                    raise CorruptMemory(str(answer))
                raise self._remote.error(answer) from answer
            found[number] = answer
        if self._local is not None and missing:
            with suppress(Failure):  # it is read again
                self._local.put([(names[number], bytes(found[number])) for number in missing])
        return [found[number] for number in range(len(extents))]


def _checked(piece: Piece) -> Checked:
    return Checked(Extent(piece.segment, piece.offset, piece.length), piece.digest)


def _name(identity: str, extent: Extent) -> str:
    """The key in the local cache; the bytes of an object never change."""
    return f"{identity}:{extent.name}:{extent.offset}:{extent.length}"


class _Recent(Generic[K, V]):
    """The values that were used last. May be used by several threads."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._held: OrderedDict[K, V] = OrderedDict()

    def find(self, keys: Iterable[K]) -> dict[K, V]:
        """Those of some values that are held."""
        found: dict[K, V] = {}
        with self._lock:
            for key in keys:
                if key in self._held:
                    self._held.move_to_end(key)
                    found[key] = self._held[key]
        return found

    def add(self, values: Mapping[K, V]) -> None:
        """Hold values, in place of those that were used longest ago."""
        with self._lock:
            self._held.update(values)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
