"""Parts of a publication's objects for a reader: from main memory, the local cache or the object
store, each checked. Neighbouring parts are read in one request, all requests in parallel; what
arrives wrong is asked for again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.share.background_writes import BackgroundWrites
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import Extent, ObjectStore
from memstore.share.parallel import at_once
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
from memstore.tiers.stats import TierCounter

K = TypeVar("K")
V = TypeVar("V")

_INDEXES, _TOKENS, _TABLES = 4096, 64, 1 << 16  # that are held in main memory
_GAP = 128 << 10  # bytes between two parts that are read rather than asked for apart
_MOST = 4 << 20  # bytes of one request: two smaller ones in parallel are faster than a larger one
# Requests of one read in parallel, and where they have _SMALL bytes in the mean: those only wait.
_AT_ONCE, _SMALL_AT_ONCE, _SMALL = 32, 128, 64 << 10
_TRIES = 3  # of parts that are missing or wrong: a store may answer late or wrongly

Check = Callable[[int, bytes | memoryview], None]
"""Takes the number of a part and bytes; raises CorruptMemory where they are not its bytes."""


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


class Span(NamedTuple):
    """One request: bytes of an object, and the numbers of the extents that lie in them."""

    name: str
    offset: int
    length: int
    extents: list[int]


def coalesce(extents: Sequence[Extent]) -> list[Span]:
    """The requests that read some extents: one for extents of an object that lie up to _GAP bytes
    apart, of _MOST bytes together.
    """
    spans: list[Span] = []
    for number in sorted(range(len(extents)), key=lambda number: extents[number]):
        name, offset, length = extents[number]
        if spans and spans[-1].name == name:
            last = spans[-1]
            end = max(last.offset + last.length, offset + length)
            if offset - last.offset - last.length <= _GAP and end - last.offset <= _MOST:
                spans[-1] = last._replace(length=end - last.offset)
                last.extents.append(number)
                continue
        spans.append(Span(name, offset, length, [number]))
    return spans


class PieceReader:
    """Pieces of an object store. May be used by several threads."""

    def __init__(self, objects: ObjectStore, local: LocalCache | None) -> None:
        self.objects, self._local = objects, local
        self.writes = BackgroundWrites()  # to caches
        self.counter = TierCounter()  # of the object store
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
            held[piece] = values_of(self.objects, piece, data)
        tokens = {piece: held[piece] for piece in missing if piece.kind == "tokens"}
        _hold(self._tokens, tokens, _TOKENS)
        return [held[piece] for piece in pieces]

    def tables(self, pieces: Sequence[Piece]) -> list[dict[int, Extent]]:
        """Where the values of pieces are, by the first number of each; read from the beginnings of
        the pieces alone, all missing ones at the same time. Raises CorruptMemory, StoreUnavailable.
        """
        held = _held(self._tables, pieces)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]

        def check(number: int, data: bytes | memoryview) -> None:
            piece = missing[number]
            try:
                places = decode_table(data, piece.take)
            except ValueError as error:
                raise damaged(self.objects, piece, error) from error
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
                key: index_of(self.objects, pieces[key].row, pieces[key].piece, data)
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

        def check(number: int, data: bytes | memoryview) -> None:
            (name, offset, length), digest = wanted[number]
            if xxh3_64_intdigest(data) != digest:
                raise CorruptMemory(
                    f"{self.objects.url}: {length:,} bytes of {name} from {offset:,} on are "
                    "damaged (wrong checksum); run memstore verify, or publish the documents "
                    "again with --check"
                )

        return self._read([each.extent for each in wanted], check)

    def _read(self, extents: Sequence[Extent], check: Check) -> list[bytes | memoryview]:
        """Bytes of extents from the local cache, and all missing ones from the object store."""
        found: dict[int, bytes | memoryview] = {}
        names = [_name(self.objects.identity, extent) for extent in extents]
        if self._local is not None and extents:
            most = max(extent.length for extent in extents)
            for number, cached in enumerate(self._local.get_many(names, most)):
                if cached is not None:
                    try:
                        check(number, cached)
                        found[number] = cached
                    except CorruptMemory:
                        self._local.drop(names[number])
        missing = [number for number in range(len(extents)) if number not in found]
        answers = self.fetch(
            [extents[number] for number in missing],
            lambda number, data: check(missing[number], data),
        )
        for number, answer in zip(missing, answers):
            if isinstance(answer, MemstoreError):
                raise answer
            found[number] = answer
        if self._local is not None and missing:
            items = [(names[number], bytes(found[number])) for number in missing]
            self.writes.add(partial(self._local.put, items), sum(len(data) for _, data in items))
        return [found[number] for number in range(len(extents))]

    def fetch(self, extents: Sequence[Extent], check: Check) -> list[memoryview | MemstoreError]:
        """The bytes of extents in the object store, or why they could not be read."""
        found: dict[int, memoryview | MemstoreError] = {}
        left = list(range(len(extents)))
        for _ in range(_TRIES):
            spans = coalesce([extents[number] for number in left])
            small = sum(span.length for span in spans) <= _SMALL * len(spans)
            answers = at_once(self._span, spans, _SMALL_AT_ONCE if small else _AT_ONCE)
            for span, answer in zip(spans, answers):
                for number in (left[at] for at in span.extents):
                    start = extents[number].offset - span.offset
                    try:
                        if isinstance(answer, MemstoreError):
                            raise answer
                        part = answer[start : start + extents[number].length]
                        check(number, part)
                        found[number] = part
                    except (StoreUnavailable, CorruptMemory) as error:
                        self.counter.failed(_reason(error))
                        found[number] = error
            left = [n for n in left if isinstance(found[n], CorruptMemory | ObjectNotFound)]
            if not left:
                break
        return [found[number] for number in range(len(extents))]

    def _span(self, span: Span) -> memoryview | MemstoreError:
        try:
            return self.objects.get_range(span.name, span.offset, span.length)
        except (StoreUnavailable, CorruptMemory) as error:
            return error


def _reason(error: MemstoreError) -> str:
    """Why a read failed, for statistics."""
    if isinstance(error, StoreUnavailable):
        return "missing" if isinstance(error, ObjectNotFound) else "unavailable"
    return "damaged"


def _checked(piece: Piece) -> Checked:
    return Checked(piece.extent, piece.digest)


def _name(identity: str, extent: Extent) -> str:
    """The key in the local cache; the bytes of an object never change."""
    return f"{identity}:{extent.name}:{extent.offset}:{extent.length}"


def _held(held: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Those of some values that are held; another thread may drop them at any time."""
    return {key: value for key in keys if (value := held.get(key)) is not None}


def _hold(held: dict[K, V], new: Mapping[K, V], most: int) -> None:
    """Add values to those that are held, but not to more than so many."""
    if len(held) + len(new) > most:
        held.clear()
    held.update(new)
