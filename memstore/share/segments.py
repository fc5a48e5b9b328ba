"""Segments: immutable objects of some 32 MB that hold pieces of one or many documents. Many small
documents share one, a large document fills several, and segments are uploaded while the next are
filled.

A segment is pieces (memstore.share.pieces) and records, one after the other; the manifest says
where the pieces are. Its name is `segments/`, XXH3-128 of all that, and a random number: a
publisher finds again what an interrupted one sent, and sends under another name what is old enough
to be pruned.
"""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

from xxhash import xxh3_128_hexdigest

from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.object_store import ObjectStore
from memstore.share.parallel import at_once, begin, results
from memstore.share.pieces import Kind, Piece

SEGMENT_BYTES = 32 << 20  # of a segment at least, but for the last
FOLDER = "segments"

_KINDS: tuple[Kind, ...] = ("records", "landmarks", "tokens")
_SENDS = 4  # segments that are uploaded at once
_TAKEN = 0.5  # of the grace period: the greatest age of an unnamed segment that is used again


def is_whole(objects: ObjectStore, name: str) -> bool:
    """Is a segment in the store, undamaged? Reads all of it."""
    try:
        return name.rpartition("/")[0] == f"{FOLDER}/{xxh3_128_hexdigest(objects.get(name))}"
    except (ObjectNotFound, CorruptMemory):
        return False


def are_there(objects: ObjectStore, names: Collection[str]) -> bool:
    """Are these segments in the store? Raises StoreUnavailable."""

    def is_there(name: str) -> bool:
        return any(found.name == name for found in objects.names(name.rpartition("/")[0]))

    return all(at_once(is_there, list(names)))


class _Segment:
    """A segment, or the beginning of one, that is being filled."""

    def __init__(self, number: int) -> None:
        self.name = str(number)  # until it is uploaded
        self.chunks: list[bytes] = []
        self.size = 0


class SegmentWriter:
    """Fills and uploads segments. Pieces of a kind, which are read together, are stored together.
    Used by one thread.
    """

    def __init__(self, objects: ObjectStore, grace: float) -> None:
        """grace: seconds, that of `prune`."""
        self._objects = objects
        self._young = time.time() - _TAKEN * grace
        self._begun = 0
        self._open = {kind: self._new() for kind in _KINDS}
        self._futures: list[Future[None]] = []
        self._places: dict[str, tuple[str, int]] = {}  # object, and offset there, by first name
        self.sent: list[int] = []  # bytes of each object that was uploaded

    def append(self, kind: Kind, chunks: Sequence[bytes]) -> tuple[str, int]:
        """Append bytes for pieces of a kind; return a name for their segment, which has no object
        yet (see `placed`), and their offset. Raises StoreUnavailable.
        """
        segment = self._open[kind]
        offset = segment.size
        segment.chunks += chunks
        segment.size += sum(map(len, chunks))
        if segment.size >= SEGMENT_BYTES:
            self._send([segment])
            self._open[kind] = self._new()
        return segment.name, offset

    def flush(self) -> None:
        """Upload the rest, as one segment if it is small, and wait for all uploads. Raises
        StoreUnavailable.
        """
        left = [segment for segment in self._open.values() if segment.size]
        small = sum(segment.size for segment in left) <= SEGMENT_BYTES
        for some in [left] if small else [[segment] for segment in left]:
            self._send(some)
        self._open = {kind: self._new() for kind in _KINDS}
        results(self._futures)

    def placed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Pieces with the names of their objects, once all are uploaded."""
        found = []
        for piece in pieces:
            name, start = self._places.get(piece.segment, (piece.segment, 0))
            found.append(piece._replace(segment=name, offset=start + piece.offset))
        return found

    def _new(self) -> _Segment:
        self._begun += 1
        return _Segment(self._begun)

    def _send(self, segments: Sequence[_Segment]) -> None:
        """Upload these as one object in the background."""
        if segments:
            results(self._futures[: -(_SENDS - 1)])
            self._futures += begin(self._upload, [segments])

    def _upload(self, segments: Sequence[_Segment]) -> None:
        data = b"".join(chunk for segment in segments for chunk in segment.chunks)
        name, start = self._stored(data), 0
        for segment in segments:
            self._places[segment.name] = name, start
            start += segment.size

    def _stored(self, data: bytes) -> str:
        """The name of the object with this content, which is uploaded unless the store has it."""
        folder = f"{FOLDER}/{xxh3_128_hexdigest(data)}"
        name = f"{folder}/{os.urandom(6).hex()}"
        for found in self._objects.names(folder):
            if found.modified >= self._young:  # else it may be pruned at any time
                if found.size == len(data) and is_whole(self._objects, found.name):
                    return found.name
                name = found.name  # damaged: this repairs it for all manifests that name it
        self._objects.put(name, data)
        self.sent.append(len(data))
        return name
