"""Pieces: the parts of documents as published segments and exported files store them. A piece is
values of the tables of landmarks or tokens, or the index of a run of records, which lie before it.

A piece of values is, in little-endian order,

    magic "mV", a zero (u16), number of values (u32), XXH3-64 of the table that follows
    of each value: first number of what it is about (u64: block or token), its bytes (u32)
    the values, one after the other: as in the memory, without their checksum

so that its beginning tells where each value is. The index of a run of records is msgpack compressed
by zstd: see RecordIndex.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Block, Count, Layer, Positive, unpack
from memstore.disk.format.document import Document
from memstore.disk.format.record import WRITE_BYTES, RecordForm, WriteId
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory
from memstore.share.document_parts import IndexRun, Part, Record, Tokens
from memstore.share.object_store import Extent
from memstore.share.packed_objects import decompressed

Kind = Literal["records", "landmarks", "tokens"]
Name = Annotated[str, Meta(max_length=4096)]
Digest = Annotated[int, Meta(ge=0)]

PIECE_BYTES = 64 << 20  # of a piece: 8 MiB of values and one more, or an index
_INDEX_BYTES = 16 << 20  # of an index of records, unpacked
_VALUES, _VALUE = struct.Struct("<2sHIQ"), struct.Struct("<QI")
_BATCH_BYTES = 8 << 20  # of records that are read at once


class Piece(NamedTuple):
    """A part of a document in a segment: all of these values, or records of consecutive blocks.

    Records of passages are identified by content: pieces of several documents, or several of one
    document, may take rows of the same index.
    """

    kind: Kind
    part: Layer  # landmarks: layer, or part of a selector; else 0
    first: Count  # block that it begins with; tokens: token
    take: Positive  # number of its values, or of the blocks that the document uses
    row: Block  # of records: the row of their index that it begins with; else 0
    segment: Name  # the object; "" in an exported file
    offset: Count  # of the values, or of the index of the records
    length: Annotated[int, Meta(ge=1, le=PIECE_BYTES)]  # in bytes
    digest: Digest  # XXH3-64 of these bytes

    @property
    def extent(self) -> Extent:
        """Where its bytes are."""
        return Extent(self.segment, self.offset, self.length)


class Entry(NamedTuple):
    """A document that has left a memory: its row, without a number, and its pieces."""

    row: Document  # its id is 1
    pieces: tuple[Piece, ...]  # in order

    @classmethod
    def of(cls, row: Document, pieces: Iterable[Piece]) -> "Entry":
        """The entry of a memory's row, without what concerns that memory alone."""
        return cls(replace(row.portable(), id=1), tuple(sorted(pieces)))

    @property
    def has_records(self) -> bool:
        """Does it have keys and values, and not text alone?"""
        return any(piece.kind == "records" for piece in self.pieces)


class Ranges(Protocol):
    """Objects that are read by ranges of bytes: an object store, or one exported file."""

    @property
    def url(self) -> str:
        """Where they are, for messages."""

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Bytes of an object, of exactly this length. Raises CorruptMemory, StoreUnavailable."""


# Values


class Value(NamedTuple):
    """An entry of the table of landmarks or tokens."""

    first: int  # block, or token, that it begins with
    value: bytes


def encode_values(values: Sequence[Value]) -> bytes:
    """The piece of one or more values."""
    table = b"".join(_VALUE.pack(first, len(value)) for first, value in values)
    start = _VALUES.pack(b"mV", 0, len(values), xxh3_64_intdigest(table))
    return b"".join((start, table, *(value for _, value in values)))


def table_bytes(values: int) -> int:
    """Bytes of the beginning of a piece of so many values, which tells where they are."""
    return _VALUES.size + values * _VALUE.size


def decode_table(data: bytes | memoryview, count: int) -> dict[int, tuple[int, int]]:
    """Offset in the piece and bytes of each of its `count` values, by its first number, from the
    beginning of the piece. Raises ValueError.
    """
    data, end = memoryview(data), table_bytes(count)
    if end > len(data):
        raise ValueError("it is truncated")
    magic, zero, values, digest = _VALUES.unpack_from(data)
    if magic != b"mV" or zero or values != count:
        raise ValueError(f"it is not a piece of {count} values")
    table = data[_VALUES.size : end]
    if xxh3_64_intdigest(table) != digest:
        raise ValueError("the checksum of its table does not match")
    places = {}
    for first, length in _VALUE.iter_unpack(table):
        places[first] = end, length
        end += length
    if len(places) != count:
        raise ValueError("two of its values have one number")
    return places


def decode_values(data: bytes | memoryview, count: int) -> list[Value]:
    """The values of a piece of so many, whose checksum was compared. Raises ValueError."""
    places = decode_table(data, count)
    if table_bytes(count) + sum(length for _, length in places.values()) != len(data):
        raise ValueError("its values do not add up")
    return [Value(first, bytes(data[at : at + size])) for first, (at, size) in places.items()]


# Records


class _Index(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    writes: list[Annotated[bytes, Meta(min_length=WRITE_BYTES, max_length=WRITE_BYTES)]]
    first: Block
    layers: Annotated[list[Layer], Meta(min_length=1)]
    sizes: bytes  # u32, of each row and layer


class RecordIndex:
    """Where the records of a run are: a row for each of consecutive blocks, or passages. They are
    in order of rows and layers, the last one just before their index.
    """

    def __init__(
        self, writes: Sequence[WriteId], first: int, layers: Sequence[int], sizes: np.ndarray
    ) -> None:
        """writes: the id of one write, or the digest of each passage. first: block; 0 of passages.
        sizes: bytes of each record [rows, layers], 0 for none.
        """
        self.writes, self.first, self.layers = tuple(writes), first, tuple(layers)
        self.sizes, self.rows = sizes.astype(np.uint32), len(sizes)
        ends = np.cumsum(self.sizes, dtype=np.int64)
        self._starts = (ends - self.sizes.ravel()).reshape(self.sizes.shape)
        self.bytes = int(ends[-1]) if len(ends) else 0  # of all records
        self._column = {layer: at for at, layer in enumerate(self.layers)}

    def find(self, piece: Piece, layer: int, block: int) -> Extent | None:
        """Where the record of a block of a document is, or None. piece: the document's, with this
        index.
        """
        column, row = self._column.get(layer), piece.row + block - piece.first
        if column is None or not 0 <= row < self.rows or not self.sizes[row, column]:
            return None
        start = piece.offset - self.bytes + int(self._starts[row, column])
        return Extent(piece.segment, start, int(self.sizes[row, column]))

    def encode(self) -> bytes:
        """The index as it is stored."""
        sizes = self.sizes.astype("<u4").tobytes()
        held = _Index(list(self.writes), self.first, list(self.layers), sizes)
        return zstandard.compress(msgspec.msgpack.encode(held))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "RecordIndex":
        """The index of these bytes. Raises ValueError."""
        held = unpack(decompressed(bytes(data), _INDEX_BYTES), _Index)
        sizes = np.frombuffer(held.sizes, "<u4").reshape(-1, len(held.layers))
        if len(held.writes) not in (1, len(sizes)) or held.first + len(sizes) > 1 << 32:
            raise ValueError("it does not identify its records")
        if held.layers != sorted(set(held.layers)):
            raise ValueError("its layers are not in order")
        return cls(held.writes, held.first, held.layers, sizes)


def most_record_bytes(raw: int) -> int:
    """The greatest size of a record in any codec. raw: its bytes in codec raw, to which zstd adds
    little where it cannot compress.
    """
    return raw + raw // 16 + 1024


def piece_of(pieces: Sequence[Piece], block: int) -> Piece | None:
    """The piece that holds the records of a block, or None. pieces: of a document, in order."""
    at = bisect_left(pieces, ("records", 0, block + 1)) - 1
    if at < 0 or pieces[at].kind != "records" or block >= pieces[at].first + pieces[at].take:
        return None
    return pieces[at]


# Reading


def values_of(objects: Ranges, piece: Piece, data: bytes | memoryview) -> list[Value]:
    """The values of a piece with these bytes. Raises CorruptMemory."""
    try:
        _check_digest(piece, data)
        return decode_values(data, piece.take)
    except ValueError as error:
        raise damaged(objects, piece, error) from error


def index_of(objects: Ranges, row: Document, piece: Piece, data: bytes | memoryview) -> RecordIndex:
    """The index of a piece of records with these bytes, which must be of the document's write, or
    of passages. Raises CorruptMemory.
    """
    try:
        _check_digest(piece, data)
        index = RecordIndex.decode(data)
        if index.rows < piece.row + piece.take or index.bytes > piece.offset:
            raise ValueError("it is the index of other blocks")
        if row.of_passages:
            if len(index.writes) != index.rows:
                raise ValueError("it does not name its passages")
        elif index.first + piece.row != piece.first:
            raise ValueError("it is the index of other blocks")
        elif index.writes != (row.write,):
            raise ValueError("it is the index of another write")
    except ValueError as error:
        raise damaged(objects, piece, error) from error
    return index


def _check_digest(piece: Piece, data: bytes | memoryview) -> None:
    if len(data) != piece.length or xxh3_64_intdigest(data) != piece.digest:
        raise ValueError("its checksum does not match")


def read_parts(
    objects: Ranges, signature: Signature, row: Document, pieces: Sequence[Piece]
) -> Iterator[Part]:
    """The parts of a document, as they were in the memory that wrote it: tokens, landmarks, then
    records in order of block and layer. Checks values, and leaves records to the caller. Raises
    CorruptMemory, StoreUnavailable.
    """
    for kind in ("tokens", "landmarks"):
        for piece in (piece for piece in pieces if piece.kind == kind):
            for first, value in values_of(objects, piece, objects.get_range(*piece.extent)):
                yield (
                    Tokens(first, value) if kind == "tokens" else IndexRun(piece.part, first, value)
                )
    most = most_record_bytes(RecordForm(signature.geometry, signature.digest).raw_record_bytes)
    indexes = dict[tuple[str, int], RecordIndex]()
    for piece in sorted(piece for piece in pieces if piece.kind == "records"):
        which = piece.segment, piece.offset
        if which not in indexes:
            indexes[which] = index_of(objects, row, piece, objects.get_range(*piece.extent))
        yield from _records(objects, piece, indexes[which], most)


def _records(objects: Ranges, piece: Piece, index: RecordIndex, most: int) -> Iterator[Record]:
    """The records of a piece, read some 8 MB at a time. most: bytes of a record."""
    places: list[tuple[int, int, Extent]] = []
    for block in range(piece.first, piece.first + piece.take):
        for layer in index.layers:
            found = index.find(piece, layer, block)
            if found is not None:
                if found.length > most:
                    raise damaged(objects, piece, f"a record of {found.length:,} bytes")
                places.append((block, layer, found))
        last = block + 1 == piece.first + piece.take
        if places and (last or places[-1][2].offset - places[0][2].offset >= _BATCH_BYTES):
            start, end = places[0][2].offset, sum(places[-1][2][1:])
            data = objects.get_range(piece.segment, start, end - start)
            for number, layer, (_, at, size) in places:
                yield Record(number, layer, bytes(data[at - start : at - start + size]))
            places = []


def damaged(objects: Ranges, piece: Piece, error: object) -> CorruptMemory:
    """The error for a damaged piece."""
    where = f"{piece.kind} at byte {piece.offset} of {piece.segment or 'it'}"
    return CorruptMemory(
        f"{objects.url}: {where} are damaged ({error}); run memstore verify, or publish the "
        "document again with --check"
    )
