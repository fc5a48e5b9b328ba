"""Pieces: the parts of documents in a segment. A piece is the index of a run of records, or values
of the tables of landmarks or tokens.

A piece of values is, in little-endian order,

    magic "mV", a zero (u16), number of values (u32), XXH3-64 of the table that follows
    of each value: its bytes (u32), bytes of its key (u16), first number of what it is about (u64:
        block or token)
    the keys, one after the other: as in the memory, without the document's number
    the values, one after the other: as in the memory, without their checksum

so that its beginning tells where each value lies. The index of a
run of records is, compressed by zstd,

    magic "mI", layers (u16), writes, first block, rows (u32 each), where the records begin in the
        segment (u64)
    what identifies the records (16 bytes each): the id of one write of consecutive blocks; or, of
        passages, whose first block is 0, the digest of each
    the layers (u16 each), then of each row and layer the bytes of its record (u32; 0: none)
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.decode import Block, Count, Layer, Positive
from memstore.disk.format.document import Document
from memstore.disk.format.record import WRITE_BYTES, RecordForm, WriteId
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory
from memstore.share.object_store import Extent, ObjectStore
from memstore.share.packed_objects import decompressed

Kind = Literal["records", "landmarks", "tokens"]
Digest = Annotated[int, Meta(ge=0)]

PIECE_BYTES = 64 << 20  # of a piece: 8 MiB of values and one more, or an index
_INDEX_BYTES = 16 << 20  # of an index of records, unpacked
_VALUES, _VALUE = struct.Struct("<2sHIQ"), struct.Struct("<IHQ")
_INDEX = struct.Struct("<2sHIIIQ")


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
    segment: str  # the object
    offset: Count  # of the values, or of the index of the records
    length: Positive  # in bytes
    digest: Digest  # XXH3-64 of these bytes


class Value(NamedTuple):
    """An entry of a table; its key is without the document's number."""

    first: int  # block, or token, that it begins with
    key: bytes
    value: bytes


class ValueHead(NamedTuple):
    """A value without its bytes, as the beginning of a piece lists it."""

    first: int
    key: bytes
    length: int


def encode_values(values: Sequence[Value]) -> bytes:
    """The piece of one or more values."""
    table = b"".join(_VALUE.pack(len(v.value), len(v.key), v.first) for v in values)
    table += b"".join(value.key for value in values)
    start = _VALUES.pack(b"mV", 0, len(values), xxh3_64_intdigest(table))
    return b"".join((start, table, *(value.value for value in values)))


def table_bytes(values: int, key_bytes: int) -> int:
    """Bytes of the beginning of a piece of so many values, with keys of this length."""
    return _VALUES.size + values * (_VALUE.size + key_bytes)


def decode_heads(data: bytes | memoryview, count: int) -> tuple[list[ValueHead], int]:
    """The heads of the values of a piece of so many, from its beginning, and the offset of the
    values. Raises ValueError.
    """
    data = memoryview(data)
    magic, zero, values, digest_of_table = _unpack(_VALUES, data, 0)
    if magic != b"mV" or zero or values != count:
        raise ValueError(f"it is not a piece of {count} values")
    end = _VALUES.size + count * _VALUE.size
    if end > len(data):
        raise ValueError("it is truncated")
    heads, at = [], end
    for length, key_bytes, first in _VALUE.iter_unpack(data[_VALUES.size : end]):
        heads.append(ValueHead(first, bytes(data[at : at + key_bytes]), length))
        at += key_bytes
    if at > len(data):
        raise ValueError("it is truncated")
    if xxh3_64_intdigest(data[_VALUES.size : at]) != digest_of_table:
        raise ValueError("the checksum of its table does not match")
    return heads, at


def decode_values(data: bytes | memoryview, count: int) -> Iterator[Value]:
    """The values of a piece of so many, whose bytes were checked. Raises ValueError."""
    data = memoryview(data)
    heads, at = decode_heads(data, count)
    if at + sum(head.length for head in heads) != len(data):
        raise ValueError("its values do not add up")
    for head in heads:
        yield Value(head.first, head.key, bytes(data[at : at + head.length]))
        at += head.length


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
        magic, count, known, first, rows, start = _unpack(_INDEX, raw, 0)
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


def record_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of records, in order of blocks."""
    return sorted(piece for piece in pieces if piece.kind == "records")


def piece_of(pieces: Sequence[Piece], block: int) -> Piece | None:
    """The piece that holds the records of a block, or None. pieces: of a document, in order."""
    at = bisect_left(pieces, ("records", 0, block + 1)) - 1
    if at < 0 or pieces[at].kind != "records" or block >= pieces[at].first + pieces[at].take:
        return None
    return pieces[at]


def row_of(piece: Piece, block: int) -> int:
    """The row of a block in a piece's index."""
    return piece.row + block - piece.first


def _unpack(form: struct.Struct, data: bytes | memoryview, at: int) -> tuple:
    if len(data) < at + form.size:
        raise ValueError("it is truncated")
    return form.unpack_from(data, at)


_BATCH_BYTES = 8 << 20  # of records that are read at once


class Checked(NamedTuple):
    """Bytes of an object, and their XXH3-64."""

    extent: Extent
    digest: int


def check_piece(objects: ObjectStore, piece: Piece, data: bytes | memoryview) -> None:
    """Are these the bytes of a piece? Raises CorruptMemory."""
    if len(data) != piece.length or xxh3_64_intdigest(data) != piece.digest:
        raise damaged(objects, piece, "its checksum does not match")


def read_values(objects: ObjectStore, piece: Piece) -> list[Value]:
    """The values of a piece. Raises CorruptMemory, StoreUnavailable."""
    data = objects.get_range(piece.segment, piece.offset, piece.length)
    check_piece(objects, piece, data)
    return values_of(objects, piece, data)


def values_of(objects: ObjectStore, piece: Piece, data: bytes | memoryview) -> list[Value]:
    """The same from the bytes of the piece. Raises CorruptMemory."""
    try:
        return list(decode_values(data, piece.take))
    except ValueError as error:
        raise damaged(objects, piece, error) from error


def index_of(
    objects: ObjectStore, row: Document, piece: Piece, data: bytes | memoryview
) -> RecordIndex:
    """The index of a piece of records: of the write that its document's row names, or of passages.
    Raises CorruptMemory.
    """
    if row.of_passages:
        return passages_index(objects, piece, data)
    index = _index(objects, piece, data)
    if index.first + piece.row != piece.first:
        raise damaged(objects, piece, "it is the index of other blocks")
    if index.writes != (row.write,):
        raise damaged(objects, piece, "it is the index of another write")
    return index


def passages_index(objects: ObjectStore, piece: Piece, data: bytes | memoryview) -> RecordIndex:
    """The index of a run of passages. Raises CorruptMemory."""
    index = _index(objects, piece, data)
    if len(index.writes) != index.rows:
        raise damaged(objects, piece, "it does not name its passages")
    return index


def _index(objects: ObjectStore, piece: Piece, data: bytes | memoryview) -> RecordIndex:
    check_piece(objects, piece, data)
    try:
        index = RecordIndex.decode(data)
    except ValueError as error:
        raise damaged(objects, piece, error) from error
    if index.rows < piece.row + piece.take:
        raise damaged(objects, piece, "it is the index of other blocks")
    return index


def records(
    objects: ObjectStore, row: Document, pieces: Sequence[Piece], signature: Signature
) -> Iterator[tuple[RecordKey, memoryview]]:
    """A document's records in order of block and layer. They are not checked. Raises
    CorruptMemory, StoreUnavailable.
    """
    indexes = dict[tuple[str, int], RecordIndex]()
    most = most_record_bytes(RecordForm(signature.geometry, signature.digest).raw_record_bytes)
    for piece in record_pieces(pieces):
        which = piece.segment, piece.offset
        if which not in indexes:
            data = objects.get_range(piece.segment, piece.offset, piece.length)
            indexes[which] = index_of(objects, row, piece, data)
        index = indexes[which]
        block, end = piece.first, piece.first + piece.take
        while block < end:
            keys: list[RecordKey] = []
            extents: list[tuple[int, int]] = []
            while block < end:
                for layer in index.layers:
                    found = index.find(layer, row_of(piece, block))
                    if found is None:
                        continue
                    if found[1] > most:
                        raise damaged(objects, piece, f"a record of {found[1]:,} bytes")
                    keys.append(RecordKey(row.id, block, layer))
                    extents.append(found)
                block += 1
                if extents and extents[-1][0] + extents[-1][1] - extents[0][0] >= _BATCH_BYTES:
                    break
            if extents:
                start = extents[0][0]
                length = extents[-1][0] + extents[-1][1] - start
                data = objects.get_range(piece.segment, start, length)
                for key, (at, size) in zip(keys, extents):
                    yield key, data[at - start : at - start + size]


def damaged(objects: ObjectStore, piece: Piece, error: object) -> CorruptMemory:
    """The error for a damaged piece."""
    return CorruptMemory(
        f"{objects.url}: {piece.kind} at byte {piece.offset} of {piece.segment} are damaged "
        f"({error}); run memstore verify, or publish the document again with --check"
    )
