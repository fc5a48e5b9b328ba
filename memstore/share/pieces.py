"""What a segment holds of a document, piece by piece: runs of records with the index that finds
them, and values of the tables beside them.

A piece of values is, in little-endian order,

    magic "mV", a zero (u16), number of values (u32), XXH3-64 of the table that follows
    of each value: XXH3-64 of key and value, its bytes (u32), bytes of its key (u16), first number
        of what it is about (u64: block or token)
    the keys, one after the other: as in the memory, without the document's number
    the values, one after the other: as in the memory, without their checksum

so that its beginning tells what is the same in another state of the document. The index of a run
of records is, compressed by zstd,

    magic "mI", layers (u16), id of the write (16 bytes), first block, blocks (u32 each), where the
        records begin in the segment (u64)
    the layers (u16 each), then of each block and layer the bytes of its record (u32; 0: none)
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Block, Count, Layer, Positive
from memstore.disk.record import WriteId
from memstore.share.packed import decompressed
from memstore.share.sizes import INDEX_BYTES

Kind = Literal["records", "landmarks", "tokens"]
Digest = Annotated[int, Meta(ge=0)]

_VALUES, _VALUE = struct.Struct("<2sHIQ"), struct.Struct("<QIHQ")
_INDEX = struct.Struct("<2sH16sIIQ")


class Piece(NamedTuple):
    """Where a part of a document lies. The document has of it what no later piece begins with."""

    kind: Kind
    part: Layer  # landmarks: layer, or part of a selector; else 0
    first: Count  # block that it begins with; tokens: token
    take: Positive  # how many blocks (records), or values, of it are the document's
    segment: str  # the object
    offset: Count  # of the values, or of the index of the records
    length: Positive  # in bytes
    digest: Digest  # XXH3-64 of these bytes


class Value(NamedTuple):
    """An entry of a table: its key without the document's number, and what it holds."""

    first: int  # block, or token, that it begins with
    key: bytes
    value: bytes


class ValueHead(NamedTuple):
    """What a piece of values tells of each of them."""

    first: int
    key: bytes
    length: int
    digest: int  # XXH3-64 of key and value

    @classmethod
    def of(cls, value: Value) -> "ValueHead":
        """What is told of a value."""
        digest = xxh3_64_intdigest(value.value, xxh3_64_intdigest(value.key))
        return cls(value.first, value.key, len(value.value), digest)


def encode_values(values: Sequence[Value]) -> bytes:
    """The piece of these values, of which there is one at least."""
    heads = [ValueHead.of(value) for value in values]
    table = b"".join(_VALUE.pack(h.digest, h.length, len(h.key), h.first) for h in heads)
    table += b"".join(head.key for head in heads)
    start = _VALUES.pack(b"mV", 0, len(values), xxh3_64_intdigest(table))
    return b"".join((start, table, *(value.value for value in values)))


def head_bytes(start: bytes | memoryview) -> int:
    """Bytes of a piece's beginning up to its keys, told from its first 16. Raises ValueError."""
    magic, zero, count, _ = _unpack(_VALUES, start, 0)
    if magic != b"mV" or zero or not count:
        raise ValueError("it is no piece of values")
    return _VALUES.size + count * _VALUE.size


def decode_heads(data: bytes | memoryview) -> tuple[list[ValueHead], int]:
    """What a piece, or its beginning, tells of its values, and where they begin. Raises
    ValueError.
    """
    data = memoryview(data)
    end = head_bytes(data)
    if end > len(data):
        raise ValueError("it is truncated")
    told = list(_VALUE.iter_unpack(data[_VALUES.size : end]))
    heads, at = [], end
    for digest, length, key_bytes, first in told:
        heads.append(ValueHead(first, bytes(data[at : at + key_bytes]), length, digest))
        at += key_bytes
    if at > len(data):
        raise ValueError("it is truncated")
    if xxh3_64_intdigest(data[_VALUES.size : at]) != _unpack(_VALUES, data, 0)[3]:
        raise ValueError("the checksum of its table does not match")
    return heads, at


def decode_values(data: bytes | memoryview, take: int | None = None) -> Iterator[Value]:
    """The first `take` values of a piece, each checked. Raises ValueError."""
    data = memoryview(data)
    heads, at = decode_heads(data)
    if at + sum(head.length for head in heads) != len(data) or (take or 0) > len(heads):
        raise ValueError("its values do not add up")
    for head in heads[:take]:
        value = Value(head.first, head.key, bytes(data[at : at + head.length]))
        if ValueHead.of(value) != head:
            raise ValueError(f"the checksum of the value from {head.first} on does not match")
        at += head.length
        yield value


class RecordIndex:
    """Where the records of consecutive blocks lie in their segment."""

    def __init__(
        self, write: WriteId, first: int, layers: Sequence[int], start: int, sizes: np.ndarray
    ) -> None:
        """sizes: bytes of each record [blocks, layers], 0 for none; they lie one after the other
        in that order, the first at byte `start`.
        """
        self.write, self.first, self.layers = write, first, tuple(layers)
        self.start, self.sizes = start, sizes.astype(np.uint32)
        ends = np.cumsum(self.sizes, dtype=np.int64)
        self.starts = (start + ends - self.sizes.ravel()).reshape(self.sizes.shape)
        self.end = start + (int(ends[-1]) if len(ends) else 0)
        self._column = {layer: at for at, layer in enumerate(self.layers)}

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.sizes)

    def find(self, layer: int, block: int) -> tuple[int, int] | None:
        """First byte and length of a record; None where there is none."""
        row, column = block - self.first, self._column.get(layer)
        if column is None or not 0 <= row < len(self.sizes) or not self.sizes[row, column]:
            return None
        return int(self.starts[row, column]), int(self.sizes[row, column])

    def encode(self) -> bytes:
        """The index as it lies in its segment."""
        head = _INDEX.pack(
            b"mI", len(self.layers), self.write, self.first, len(self.sizes), self.start
        )
        layers = np.asarray(self.layers, "<u2").tobytes()
        return zstandard.compress(head + layers + self.sizes.astype("<u4").tobytes())

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "RecordIndex":
        """The index of these bytes. Raises ValueError."""
        raw = decompressed(bytes(data), INDEX_BYTES)
        magic, count, write, first, blocks, start = _unpack(_INDEX, raw, 0)
        at = _INDEX.size + 2 * count
        if magic != b"mI" or len(raw) != at + 4 * count * blocks or first + blocks > 1 << 32:
            raise ValueError("it is no index of records")
        layers = np.frombuffer(raw, "<u2", count, _INDEX.size).tolist()
        if layers != sorted(set(layers)) or start >= 1 << 62:
            raise ValueError("its layers are not in order")
        sizes = np.frombuffer(raw, "<u4", count * blocks, at).reshape(blocks, count)
        return cls(write, first, layers, start, sizes)


class BlockRange(NamedTuple):
    """Blocks of a document that one piece of records holds."""

    first: Block
    end: Block
    piece: Piece


def record_ranges(pieces: Sequence[Piece]) -> list[BlockRange]:
    """Which piece holds the records of which blocks, in order; they do not overlap."""
    own = sorted((piece for piece in pieces if piece.kind == "records"), key=lambda p: p.first)
    return [BlockRange(piece.first, piece.first + piece.take, piece) for piece in own]


def _unpack(form: struct.Struct, data: bytes | memoryview, at: int) -> tuple:
    if len(data) < at + form.size:
        raise ValueError("it is truncated")
    return form.unpack_from(data, at)
