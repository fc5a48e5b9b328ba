"""Segments: immutable objects of up to 32 MB that hold pieces of one or many documents.

A segment is

    magic "mRsegmnt", format (u32), a zero (u32), digest of the memory's signature (16 bytes)
    records as on disk, indexes of runs of records, values (memstore.share.format.pieces)
    footer: msgpack, compressed by zstd, of each piece its kind, part, first block or token, number
        of rows or values, first of these, offset, length and XXH3-64
    offset of the footer (u64), its bytes (u64), its XXH3-64, seeded with that of the first 32
        bytes, magic "mRfooter"

and its name is `segments/`, XXH3-128 of all that, and a random number: a publisher finds again what
an interrupted one sent, and sends under another name what is old enough to be pruned. Readers use
the pieces of the manifest and need no footer; verify, merge and other tools do.
"""

import os
import struct
from collections.abc import Sequence

import msgpack
import numpy as np
import zstandard
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from memstore.decode import unpack
from memstore.disk.format.record import WriteId
from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.format.packed_objects import PACKED_BYTES, check_format, decompressed
from memstore.share.format.passage_runs import Run
from memstore.share.format.pieces import Digest, Kind, Piece, RecordIndex, Value, encode_values
from memstore.share.objects.object_store import ObjectStore

FORMAT = 5
SEGMENT_BYTES = 32 << 20
FOLDER = "segments"

_HEAD, _TAIL = struct.Struct("<8sII16s"), struct.Struct("<QQQ8s")


class Segment:
    """A segment that is being filled."""

    def __init__(self, signature: bytes) -> None:
        """signature: its digest (Signature.digest)."""
        self._parts: list[bytes] = [_HEAD.pack(b"mRsegmnt", FORMAT, 0, signature)]
        self.size = _HEAD.size
        # each with the document or run of passages that it is of; the segment has no name yet
        self.pieces: list[tuple[str | Run, Piece]] = []

    def add_records(
        self,
        owner: str | Run,
        writes: Sequence[WriteId],
        first: int,
        layers: Sequence[int],
        sizes: np.ndarray,
        records: Sequence[bytes | memoryview],
    ) -> None:
        """Add consecutive blocks of one write of a document, or a run of passages. writes, first,
        sizes: as RecordIndex takes them.
        """
        index = RecordIndex(writes, first, layers, self.size, sizes)
        self._append(b"".join(records))
        assert self.size == index.end
        self._add(owner, "records", 0, first, len(sizes), index.encode())

    def add_values(self, document: str, kind: Kind, part: int, values: Sequence[Value]) -> None:
        """Add values of one kind and part, in order."""
        self._add(document, kind, part, values[0].first, len(values), encode_values(values))

    def _add(
        self, owner: str | Run, kind: Kind, part: int, first: int, take: int, data: bytes
    ) -> None:
        digest = xxh3_64_intdigest(data)
        piece = Piece(kind, part, first, take, 0, "", self.size, len(data), digest)
        self.pieces.append((owner, piece))
        self._append(data)

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self.size += len(data)

    def absorb(self, other: "Segment") -> None:
        """Add the values of another segment, which has no records."""
        assert not any(piece.kind == "records" for _, piece in other.pieces)
        by = self.size - _HEAD.size
        for owner, piece in other.pieces:
            self.pieces.append((owner, piece._replace(offset=piece.offset + by)))
        for part in other._parts[1:]:
            self._append(part)

    def encode(self) -> bytes:
        """The object."""
        table = [(*piece[:5], *piece[6:]) for _, piece in self.pieces]
        footer = zstandard.compress(msgpack.packb(table))
        digest = xxh3_64_intdigest(footer, xxh3_64_intdigest(self._parts[0]))
        tail = _TAIL.pack(self.size, len(footer), digest, b"mRfooter")
        return b"".join((*self._parts, footer, tail))


def send(objects: ObjectStore, data: bytes, *, young: float) -> tuple[str, float | None]:
    """Upload a segment unless the store has it; return its name, and when it was stored (seconds
    since 1970), or None where it was uploaded now.

    young: seconds since 1970; a segment from before may be pruned at any time, and does not count.
    """
    folder = f"{FOLDER}/{xxh3_128_hexdigest(data)}"
    for found in objects.names(folder):
        if found.modified < young:
            continue
        if found.size == len(data) and is_whole(objects, found.name):
            return found.name, found.modified
        objects.put(found.name, data)  # damaged: this repairs it for all manifests that name it
        return found.name, None
    name = f"{folder}/{os.urandom(6).hex()}"
    objects.put(name, data)
    return name, None


def is_whole(objects: ObjectStore, name: str) -> bool:
    """Is a segment in the store, undamaged? Reads all of it."""
    try:
        return name.rpartition("/")[0] == f"{FOLDER}/{xxh3_128_hexdigest(objects.get(name))}"
    except (ObjectNotFound, CorruptMemory):
        return False


def is_there(objects: ObjectStore, name: str) -> bool:
    """Is a segment in the store?"""
    return any(found.name == name for found in objects.names(name.rpartition("/")[0]))


_Row = tuple[Kind, int, int, int, int, int, int, Digest]


def read_footer(objects: ObjectStore, name: str, size: int) -> tuple[bytes, list[Piece]]:
    """The digest of a segment's signature and its pieces, from its footer. size: of the object.
    Raises CorruptMemory, NewerFormat, StoreUnavailable.
    """
    try:
        if size < _HEAD.size + _TAIL.size:
            raise ValueError("it is truncated")
        head, tail = objects.get_ranges(name, [(0, _HEAD.size), (size - _TAIL.size, _TAIL.size)])
        magic, number, _, signature = _HEAD.unpack(head)
        at, length, digest, end = _TAIL.unpack(tail)
        if magic != b"mRsegmnt":
            raise ValueError("it is not a segment")
        check_format(f"{objects.url}: {name}", number, FORMAT)
        if end != b"mRfooter" or at + length + _TAIL.size != size or at < _HEAD.size:
            raise ValueError("it has no footer")
        if length > PACKED_BYTES:
            raise ValueError("its footer is too large")
        (footer,) = objects.get_ranges(name, [(at, length)])
        if xxh3_64_intdigest(footer, xxh3_64_intdigest(head)) != digest:
            raise ValueError("the checksum of its footer does not match")
        rows = unpack(decompressed(bytes(footer)), list[_Row])
        return signature, [Piece(*piece[:5], name, *piece[5:]) for piece in rows]
    except ValueError as error:
        raise CorruptMemory(
            f"{objects.url}: {name} is damaged ({error}); publish its documents again with --check"
        ) from error
