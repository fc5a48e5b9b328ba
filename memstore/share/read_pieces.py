"""Reading pieces: values, indexes of records, and all records of a document."""

from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.disk.format.record import RecordForm
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory
from memstore.share.document_pages import Entry
from memstore.share.pieces import (
    Piece,
    RecordIndex,
    Value,
    ValueHead,
    decode_heads,
    decode_values,
    most_record_bytes,
    record_pieces,
    row_of,
)
from memstore.share.object_store import Extent, ObjectStore

_HEADS_BYTES = 64 << 10  # of a piece's beginning that are read first
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
    """The values that a document uses of a piece. Raises CorruptMemory, StoreUnavailable."""
    (data,) = objects.get_ranges(piece.segment, [(piece.offset, piece.length)])
    check_piece(objects, piece, data)
    return values_of(objects, piece, data)


def values_of(objects: ObjectStore, piece: Piece, data: bytes | memoryview) -> list[Value]:
    """The same from the bytes of the piece. Raises CorruptMemory."""
    try:
        return list(decode_values(data, piece.take))
    except ValueError as error:
        raise damaged(objects, piece, error) from error


def read_heads(objects: ObjectStore, piece: Piece) -> list[ValueHead]:
    """The heads of the values that a document uses of a piece. Raises CorruptMemory,
    StoreUnavailable.
    """
    for length in (min(piece.length, _HEADS_BYTES), piece.length):
        (data,) = objects.get_ranges(piece.segment, [(piece.offset, length)])
        try:
            return decode_heads(data)[0][: piece.take]
        except ValueError as error:
            if length == piece.length:
                raise damaged(objects, piece, error) from error
    raise AssertionError("a piece has a length")


def index_of(
    objects: ObjectStore, entry: Entry, piece: Piece, data: bytes | memoryview
) -> RecordIndex:
    """The index of a piece of records: of the write that its document's row names, or of passages.
    Raises CorruptMemory.
    """
    if entry.row.of_passages:
        return passages_index(objects, piece, data)
    index = _index(objects, piece, data)
    if index.first + piece.row != piece.first:
        raise damaged(objects, piece, "it is the index of other blocks")
    if index.writes != (entry.row.write_of(piece.first),):
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


class PublishedRecord(NamedTuple):
    """A record as it is stored."""

    key: RecordKey
    data: memoryview


def records(objects: ObjectStore, entry: Entry, signature: Signature) -> Iterator[PublishedRecord]:
    """A document's records in order of block and layer, as its row asks for them. They are not
    checked. Raises CorruptMemory, StoreUnavailable.
    """
    row, indexes = entry.row, dict[tuple[str, int], RecordIndex]()
    starts = row.first_blocks(signature)
    most = most_record_bytes(RecordForm(signature.geometry, signature.digest).raw_record_bytes)
    for piece in record_pieces(entry.pieces):
        which = piece.segment, piece.offset
        if which not in indexes:
            (data,) = objects.get_ranges(piece.segment, [(piece.offset, piece.length)])
            indexes[which] = index_of(objects, entry, piece, data)
        index = indexes[which]
        block, end = piece.first, piece.first + piece.take
        while block < end:
            keys: list[RecordKey] = []
            extents: list[tuple[int, int]] = []
            while block < end:
                for layer in index.layers:
                    found = index.find(layer, row_of(piece, block))
                    if found is not None and found[1] > most:
                        raise damaged(objects, piece, f"a record of {found[1]:,} bytes")
                    if found is not None and block >= starts.get(layer, block + 1):
                        keys.append(RecordKey(row.id, block, layer))
                        extents.append(found)
                block += 1
                if extents and extents[-1][0] + extents[-1][1] - extents[0][0] >= _BATCH_BYTES:
                    break
            if extents:
                start = extents[0][0]
                length = extents[-1][0] + extents[-1][1] - start
                (data,) = objects.get_ranges(piece.segment, [(start, length)])
                for key, (at, size) in zip(keys, extents):
                    yield PublishedRecord(key, data[at - start : at - start + size])


def damaged(objects: ObjectStore, piece: Piece, error: object) -> CorruptMemory:
    """The error for a damaged piece."""
    return CorruptMemory(
        f"{objects.url}: {piece.kind} at byte {piece.offset} of {piece.segment} are damaged "
        f"({error}); run memstore verify, or publish the document again with --check"
    )
