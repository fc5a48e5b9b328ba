"""Segments: immutable objects of up to 32 MB that hold pieces of one or many documents.

A segment is records as on disk, indexes of runs of records, and values
(memstore.share.pieces), one after the other; the manifest says where the pieces are. Its
name is `segments/`, XXH3-128 of all that, and a random number: a publisher finds again what an
interrupted one sent, and sends under another name what is old enough to be pruned.
"""

import os
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from memstore.disk.format.record import WriteId
from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.passage_runs import Run
from memstore.share.pieces import Kind, Piece, RecordIndex, Value, encode_values
from memstore.share.object_store import ObjectStore

SEGMENT_BYTES = 32 << 20
FOLDER = "segments"


class Segment:
    """A segment that is being filled."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0
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
        for owner, piece in other.pieces:
            self.pieces.append((owner, piece._replace(offset=piece.offset + self.size)))
        for part in other._parts:
            self._append(part)

    def encode(self) -> bytes:
        """The object."""
        return b"".join(self._parts)


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
