"""Pieces of published documents for a reader: from main memory, or read and checked. Indexes of
records, values of tokens, and where values of landmarks are, stay in main memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, MemstoreError, StoreUnavailable
from memstore.share.cached_reads import CachedReads
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

K = TypeVar("K")
V = TypeVar("V")

_INDEXES, _TOKENS, _TABLES = 4096, 64, 1 << 16  # that are held in main memory


class Checked(NamedTuple):
    """Bytes of an object, and their XXH3-64."""

    extent: Extent
    digest: int


class RecordPlace(NamedTuple):
    """A record of a block of a document, and the piece that has it."""

    row: Document
    piece: Piece
    layer: int
    block: int


class PieceReader:
    """Pieces of an object store. May be used by several threads."""

    def __init__(self, reads: CachedReads) -> None:
        self._reads, self._objects = reads, reads.objects
        self._indexes: dict[Checked, RecordIndex] = {}
        self._tokens: dict[Piece, list[Value]] = {}
        self._tables: dict[Piece, dict[int, Extent]] = {}

    def values(self, pieces: Sequence[Piece]) -> list[list[Value]]:
        """The values of pieces, all missing ones read at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        held = _held(self._tokens, pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]
        for piece, data in zip(missing, self.read(list(map(_checked, missing)))):
            held[piece] = values_of(self._objects, piece, data)
        tokens = {piece: held[piece] for piece in missing if piece.kind == "tokens"}
        _hold(self._tokens, tokens, _TOKENS)
        return [held[piece] for piece in pieces]

    def tables(self, pieces: Sequence[Piece]) -> list[dict[int, Extent]]:
        """Where the values of pieces are, by the first number of each; read from the beginnings of
        the pieces alone, all missing ones at the same time. Raises CorruptMemory, StoreUnavailable.
        """
        held = _held(self._tables, pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]

        def check(number: int, data: memoryview) -> None:
            piece = missing[number]
            try:
                places = decode_table(data, piece.take)
            except ValueError as error:
                raise damaged(self._objects, piece, error) from error
            held[piece] = {
                first: Extent(piece.segment, piece.offset + at, size)
                for first, (at, size) in places.items()
            }

        begins = [Extent(p.segment, p.offset, min(p.length, table_bytes(p.take))) for p in missing]
        self._read(begins, check)
        _hold(self._tables, {piece: held[piece] for piece in missing}, _TABLES)
        return [held[piece] for piece in pieces]

    def find(self, wanted: Sequence[RecordPlace]) -> list[Extent | MemstoreError | None]:
        """The bytes of records; None for a missing record, an error where its index could not be
        read.
        """
        pieces = {_checked(place.piece): place for place in wanted}
        indexes = _held(self._indexes, pieces)
        missing = [key for key in pieces if key not in indexes]
        failed: MemstoreError | None = None
        try:
            new = {
                key: index_of(self._objects, pieces[key].row, pieces[key].piece, data)
                for key, data in zip(missing, self.read(missing))
            }
            _hold(self._indexes, new, _INDEXES)
            indexes |= new
        except (StoreUnavailable, CorruptMemory) as error:  # of one of them
            failed = error
        found: list[Extent | MemstoreError | None] = []
        for _, piece, layer, block in wanted:
            index = indexes.get(_checked(piece))
            found.append(failed if index is None else index.find(piece, layer, block))
        return found

    def read(self, wanted: Sequence[Checked]) -> list[bytes | memoryview]:
        """Bytes of objects. Raises CorruptMemory, StoreUnavailable."""

        def check(number: int, data: memoryview) -> None:
            (name, offset, length), digest = wanted[number]
            if xxh3_64_intdigest(data) != digest:
                raise CorruptMemory(
                    f"{self._objects.url}: {length:,} bytes of {name} from {offset:,} on are "
                    "damaged (wrong checksum); run memstore verify, or publish the documents "
                    "again with --check"
                )

        return self._read([each.extent for each in wanted], check)

    def _read(
        self, extents: Sequence[Extent], check: Callable[[int, memoryview], None]
    ) -> list[bytes | memoryview]:
        """Bytes of objects, which never change: their place is their name in the caches."""
        names = [f"{self._objects.identity}:{name}:{at}:{size}" for name, at, size in extents]
        most = max((extent.length for extent in extents), default=0)
        found, _ = self._reads.read(names, most, check, lambda left: [extents[n] for n in left])
        data: list[bytes | memoryview] = []
        for answer in found:
            if isinstance(answer, MemstoreError):
                raise answer
            data.append(answer.data)
        return data


def _checked(piece: Piece) -> Checked:
    return Checked(piece.extent, piece.digest)


def _held(held: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Those of some values that are held; another thread may drop them at any time."""
    return {key: value for key in keys if (value := held.get(key)) is not None}


def _hold(held: dict[K, V], new: Mapping[K, V], most: int) -> None:
    """Add values to those that are held, but not to more than so many."""
    if len(held) + len(new) > most:
        held.clear()
    held.update(new)
