"""Pieces: the parts of documents as published segments and exported files store them. A piece is
the index of a run of records, or values of the tables of landmarks or tokens.

A piece of values is, in little-endian order,

    magic "mV", a zero (u16), number of values (u32), XXH3-64 of the table that follows
    of each value: first number of what it is about (u64: block or token), its bytes (u32)
    the values, one after the other: as in the memory, without their checksum

so that its beginning tells where each value is. The index of a run of records is, compressed by
zstd,

    magic "mI", layers (u16), writes, first block, rows (u32 each), where the records begin in the
        segment (u64)
    what identifies the records (16 bytes each): the id of one write of consecutive blocks; or, of
        passages, whose first block is 0, the digest of each
    the layers (u16 each), then of each row and layer the bytes of its record (u32; 0: none)
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Block, Count, Layer, Positive
from memstore.disk.format.document import Document
from memstore.disk.format.record import WRITE_BYTES, RecordForm, WriteId
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory
from memstore.share.document_parts import IndexRun, Part, Record, Tokens
from memstore.share.packed_objects import decompressed

Kind = Literal["records", "landmarks", "tokens"]
Digest = Annotated[int, Meta(ge=0)]

PIECE_BYTES = 64 << 20  # of a piece: 8 MiB of values and one more, or an index
_INDEX_BYTES = 16 << 20  # of an index of records, unpacked
_VALUES, _VALUE = struct.Struct("<2sHIQ"), struct.Struct("<QI")
_INDEX = struct.Struct("<2sHIIIQ")
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
    segment: str  # the object; "" in an exported file
    offset: Count  # of the values, or of the index of the records
    length: Positive  # in bytes
    digest: Digest  # XXH3-64 of these bytes


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
    magic, zero, values, digest = _unpack(_VALUES, data)
    if magic != b"mV" or zero or values != count:
        raise ValueError(f"it is not a piece of {count} values")
    if end > len(data):
        raise ValueError("it is truncated")
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


class RecordIndex:
    """Where records are in their segment: a row for each of consecutive blocks, or passages."""

    def __init__(
        self,
        writes: Sequence[WriteId],
        first: int,
        layers: Sequence[int],
        start: int,
        sizes: np.ndarray,
    ) -> None:
        """writes: the id of one write, or the digest of each passage. first: block; 0 of passages.
        sizes: bytes of each record [rows, layers], 0 for none. Records are consecutive in that
        order, the first at byte `start`.
        """
        self.writes, self.first, self.layers = tuple(writes), first, tuple(layers)
        self.start, self.sizes = start, sizes.astype(np.uint32)
        ends = np.cumsum(self.sizes, dtype=np.int64)
        self.starts = (start + ends - self.sizes.ravel()).reshape(self.sizes.shape)
        self.end = start + (int(ends[-1]) if len(ends) else 0)
        self._column = {layer: at for at, layer in enumerate(self.layers)}

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.sizes)

    def find(self, layer: int, row: int) -> tuple[int, int] | None:
        """First byte and length of a record, or None."""
        column = self._column.get(layer)
        if column is None or not 0 <= row < len(self.sizes) or not self.sizes[row, column]:
            return None
        return int(self.starts[row, column]), int(self.sizes[row, column])

    def encode(self) -> bytes:
        """The index as it is stored."""
        head = _INDEX.pack(
            b"mI", len(self.layers), len(self.writes), self.first, len(self.sizes), self.start
        )
        layers = np.asarray(self.layers, "<u2").tobytes()
        sizes = self.sizes.astype("<u4").tobytes()
        return zstandard.compress(b"".join((head, *self.writes, layers, sizes)))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "RecordIndex":
        """The index of these bytes. Raises ValueError."""
        raw = decompressed(bytes(data), _INDEX_BYTES)
        magic, count, known, first, rows, start = _unpack(_INDEX, raw)
        names = _INDEX.size + WRITE_BYTES * known
        at = names + 2 * count
        if magic != b"mI" or len(raw) != at + 4 * count * rows or first + rows > 1 << 32:
            raise ValueError("it is not an index of records")
        if known not in (1, rows):
            raise ValueError("it does not identify its records")
        layers = np.frombuffer(raw, "<u2", count, names).tolist()
        if layers != sorted(set(layers)) or start >= 1 << 62:
            raise ValueError("its layers are not in order")
        sizes = np.frombuffer(raw, "<u4", count * rows, at).reshape(rows, count)
        writes = [raw[n : n + WRITE_BYTES] for n in range(_INDEX.size, names, WRITE_BYTES)]
        return cls(writes, first, layers, start, sizes)


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


def row_of(piece: Piece, block: int) -> int:
    """The row of a block in a piece's index."""
    return piece.row + block - piece.first


def _unpack(form: struct.Struct, data: bytes | memoryview) -> tuple:
    if len(data) < form.size:
        raise ValueError("it is truncated")
    return form.unpack_from(data)


# Reading


def check_piece(objects: Ranges, piece: Piece, data: bytes | memoryview) -> None:
    """Compare the bytes of a piece with its checksum. Raises CorruptMemory."""
    if len(data) != piece.length or xxh3_64_intdigest(data) != piece.digest:
        raise damaged(objects, piece, "its checksum does not match")


def values_of(objects: Ranges, piece: Piece, data: bytes | memoryview) -> list[Value]:
    """The values of a piece with these bytes. Raises CorruptMemory."""
    try:
        return decode_values(data, piece.take)
    except ValueError as error:
        raise damaged(objects, piece, error) from error


def index_of(objects: Ranges, row: Document, piece: Piece, data: bytes | memoryview) -> RecordIndex:
    """The index of a piece of records with these bytes, which must be of the document's write, or
    of passages. Raises CorruptMemory.
    """
    check_piece(objects, piece, data)
    try:
        index = RecordIndex.decode(data)
        if index.rows < piece.row + piece.take:
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


def read_piece(objects: Ranges, piece: Piece) -> memoryview:
    """The bytes of a piece, which are not checked. Raises CorruptMemory, StoreUnavailable."""
    return objects.get_range(piece.segment, piece.offset, piece.length)


def read_parts(
    objects: Ranges, signature: Signature, row: Document, pieces: Sequence[Piece]
) -> Iterator[Part]:
    """The parts of a document, as they were in the memory that wrote it: tokens, landmarks, then
    records in order of block and layer. Checks values, and leaves records to the caller. Raises
    CorruptMemory, StoreUnavailable.
    """
    for kind in ("tokens", "landmarks"):
        for piece in (piece for piece in pieces if piece.kind == kind):
            data = read_piece(objects, piece)
            check_piece(objects, piece, data)
            for first, value in values_of(objects, piece, data):
                yield (
                    Tokens(first, value) if kind == "tokens" else IndexRun(piece.part, first, value)
                )
    most = most_record_bytes(RecordForm(signature.geometry, signature.digest).raw_record_bytes)
    indexes = dict[tuple[str, int], RecordIndex]()
    for piece in sorted(piece for piece in pieces if piece.kind == "records"):
        which = piece.segment, piece.offset
        if which not in indexes:
            indexes[which] = index_of(objects, row, piece, read_piece(objects, piece))
        yield from _records(objects, piece, indexes[which], most)


def _records(objects: Ranges, piece: Piece, index: RecordIndex, most: int) -> Iterator[Record]:
    """The records of a piece, read some 8 MB at a time. most: bytes of a record."""
    places: list[tuple[int, int, int, int]] = []  # block, layer, offset, bytes
    for block in range(piece.first, piece.first + piece.take):
        for layer in index.layers:
            found = index.find(layer, row_of(piece, block))
            if found is not None:
                if found[1] > most:
                    raise damaged(objects, piece, f"a record of {found[1]:,} bytes")
                places.append((block, layer, *found))
        last = block + 1 == piece.first + piece.take
        if places and (last or places[-1][2] - places[0][2] >= _BATCH_BYTES):
            start, end = places[0][2], places[-1][2] + places[-1][3]
            data = objects.get_range(piece.segment, start, end - start)
            for number, layer, at, size in places:
                yield Record(number, layer, bytes(data[at - start : at - start + size]))
            places = []


def damaged(objects: Ranges, piece: Piece, error: object) -> CorruptMemory:
    """The error for a damaged piece."""
    where = f"{piece.kind} at byte {piece.offset} of {piece.segment or 'it'}"
    return CorruptMemory(
        f"{objects.url}: {where} are damaged ({error}); run memstore verify, or publish the "
        "document again with --check"
    )
