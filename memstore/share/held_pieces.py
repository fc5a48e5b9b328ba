"""Pieces of published documents for a reader: from main memory, the local cache or the object
store, each checked.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, DocumentNotFound, StoreUnavailable
from memstore.share.calls import Failure
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import Entry
from memstore.share.pieces import (
    Checked,
    Extent,
    Piece,
    RecordIndex,
    Value,
    check_piece,
    damaged,
    decode_heads,
    index_of,
    piece_of,
    row_of,
    table_bytes,
    values_of,
)
from memstore.share.remote import Remote, as_failure

K = TypeVar("K")
V = TypeVar("V")

_INDEXES, _TOKENS, _TABLES = 4096, 64, 1 << 16  # that are held in main memory

Check = Callable[[int, bytes | memoryview], None]
"""Takes the number of an extent and bytes; raises CorruptMemory where they are not its bytes."""


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
            for key, value in values.items():
                self._held[key] = value
            while len(self._held) > self._most:
                self._held.popitem(last=False)


class Table(NamedTuple):
    """Where the values of a piece are in its segment, by the first block of each."""

    segment: str
    places: dict[int, tuple[int, int]]  # offset, bytes

    @classmethod
    def of(cls, piece: Piece, data: bytes | memoryview) -> "Table":
        """The table from a piece's beginning. Raises ValueError."""
        heads, at = decode_heads(data, piece.take)
        places = {}
        for head in heads:
            places[head.first] = piece.offset + at, head.length
            at += head.length
        return cls(piece.segment, places)


class HeldPieces:
    """Pieces of an object store. May be used by several threads."""

    def __init__(self, remote: Remote, local: LocalCache | None) -> None:
        self._remote, self._local = remote, local
        self._indexes = _Recent[tuple[str, int], RecordIndex](_INDEXES)
        self._tokens = _Recent[Piece, list[Value]](_TOKENS)
        self._tables = _Recent[Piece, Table](_TABLES)

    def values(self, pieces: Sequence[Piece]) -> list[list[Value]]:
        """The values of pieces, all that are missing read at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        held = self._tokens.find(pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]
        for piece, data in zip(missing, self._data(missing, None)):
            held[piece] = values_of(self._remote.objects, piece, data)
        self._tokens.add({piece: held[piece] for piece in missing if piece.kind == "tokens"})
        return [held[piece] for piece in pieces]

    def tables(self, pieces: Sequence[Piece], key_bytes: int) -> list[Table]:
        """Where the values of pieces lie, read from their beginnings alone, all that are missing at
        the same time. key_bytes: of the key of each value. Raises CorruptMemory, StoreUnavailable.
        """
        held = self._tables.find(pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]

        def check(number: int, data: bytes | memoryview) -> None:
            try:
                Table.of(missing[number], data)
            except ValueError as error:
                raise damaged(self._remote.objects, missing[number], error) from error

        extents = [
            Extent(p.segment, p.offset, min(p.length, table_bytes(p.take, key_bytes)))
            for p in missing
        ]
        for piece, data in zip(missing, self._checked(extents, check)):
            held[piece] = Table.of(piece, data)
        self._tables.add(held)
        return [held[piece] for piece in pieces]

    def checked(self, wanted: Sequence[Checked]) -> list[bytes | memoryview]:
        """Bytes of objects, checked. Raises CorruptMemory, StoreUnavailable."""

        def check(number: int, data: bytes | memoryview) -> None:
            if xxh3_64_intdigest(data) != wanted[number].digest:
                where = wanted[number].extent
                raise CorruptMemory(
                    f"{self._remote.objects.url}: {where.length:,} bytes of {where.name} from "
                    f"{where.offset:,} on are damaged"
                )

        return self._checked([each.extent for each in wanted], check)

    def _data(self, pieces: Sequence[Piece], until: float | None) -> list[bytes | memoryview]:
        """The bytes of pieces."""
        objects = self._remote.objects
        return self._checked(
            [Extent(piece.segment, piece.offset, piece.length) for piece in pieces],
            lambda number, data: check_piece(objects, pieces[number], data),
            until,
        )

    def _checked(
        self, extents: Sequence[Extent], check: Check, until: float | None = None
    ) -> list[bytes | memoryview]:
        """The bytes of extents from the local cache or the object store, all that are missing read
        at the same time, until then (None: within the deadline). Raises CorruptMemory,
        StoreUnavailable.
        """
        found: list[bytes | memoryview | None] = [None] * len(extents)
        names = [_name(self._remote.objects.identity, extent) for extent in extents]
        if self._local is not None:
            for at, kept in enumerate(
                self._local.get_many(names, [extent.length for extent in extents])
            ):
                if isinstance(kept, bytes):
                    try:
                        check(at, kept)
                        found[at] = kept
                    except CorruptMemory:
                        self._local.drop(names[at])
        missing = [at for at, data in enumerate(found) if data is None]

        def check_missing(number: int, data: memoryview) -> None:
            try:
                check(missing[number], data)
            except CorruptMemory as error:
                raise Failure("damaged", str(error)) from error

        if until is None:
            until = self._remote.until(sum(extents[at].length for at in missing))
        answers = self._remote.read([extents[at] for at in missing], check_missing, until)
        for at, answer in zip(missing, answers):
            if isinstance(answer, Failure):
                if answer.reason == "damaged":
                    raise CorruptMemory(str(answer))
                raise self._remote.error(answer) from answer
            found[at] = answer
        if self._local is not None and missing:
            with suppress(Failure):  # it is read again
                self._local.put([(names[at], bytes(found[at] or b"")) for at in missing])
        return [data for data in found if data is not None]

    def find(
        self, entries: Mapping[int, Entry], wanted: Sequence[tuple[int, RecordKey]], until: float
    ) -> list[Extent | Failure | None]:
        """Where the records of documents are; None for one that its document lacks, a Failure where
        that could not be read. Raises DocumentNotFound, CorruptMemory.
        """
        pieces = [self._piece(entries, document, key.block) for document, key in wanted]
        needed = {
            (piece.segment, piece.offset): (entries[document].row, piece)
            for (document, _), piece in zip(wanted, pieces)
            if piece is not None
        }
        indexes = self._indexes_of(needed, until)
        places: list[Extent | Failure | None] = []
        for (_, key), piece in zip(wanted, pieces):
            if piece is None:
                places.append(None)
                continue
            index = indexes[piece.segment, piece.offset]
            if isinstance(index, Failure):
                places.append(index)
                continue
            extent = index.find(key.layer, row_of(piece, key.block))
            places.append(None if extent is None else Extent(piece.segment, *extent))
        return places

    def _piece(self, entries: Mapping[int, Entry], document: int, block: int) -> Piece | None:
        """The piece that holds a document's records of a block."""
        if document not in entries:
            raise DocumentNotFound(
                f"document {document} is not in {self._remote.objects.url}: it was unpublished"
            )
        return piece_of(entries[document].pieces, block)

    def _indexes_of(
        self, wanted: Mapping[tuple[str, int], tuple[Document, Piece]], until: float
    ) -> dict[tuple[str, int], RecordIndex | Failure]:
        """Indexes of records by segment and offset; wanted: each as a piece of a document."""
        indexes: dict[tuple[str, int], RecordIndex | Failure] = {**self._indexes.find(wanted)}
        missing = [which for which in wanted if which not in indexes]
        try:
            parts = self._data([wanted[which][1] for which in missing], until)
            new = {
                which: index_of(self._remote.objects, *wanted[which], data)
                for which, data in zip(missing, parts)
            }
            self._indexes.add(new)
            indexes |= new
        except StoreUnavailable as error:  # of one: the caller may ask for one at a time
            indexes |= dict.fromkeys(missing, as_failure(error))
        except CorruptMemory as error:
            indexes |= dict.fromkeys(missing, Failure("damaged", str(error)))
        return indexes


def _name(identity: str, extent: Extent) -> str:
    """The key in the local cache; the bytes of an object never change."""
    return f"{identity}:{extent.name}:{extent.offset}:{extent.length}"
