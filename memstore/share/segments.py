"""Segments: immutable objects of some 32 MB that hold pieces of one or many documents. Many small
documents share one, a large document fills several, and segments are uploaded while the next are
filled.

A segment is records as on disk, indexes of runs of records, and values (memstore.share.pieces), one
after the other; the manifest says where the pieces are. Its name is `segments/`, XXH3-128 of all
that, and a random number: a publisher finds again what an interrupted one sent, and sends under
another name what is old enough to be pruned.
"""

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from xxhash import xxh3_128_hexdigest

from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.calls import at_once, begin
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Kind, Piece

SEGMENT_BYTES = 32 << 20  # of a segment, about
FOLDER = "segments"

_KINDS: tuple[Kind, ...] = ("records", "landmarks", "tokens")
_SENDS = 4  # segments that are uploaded at once
# Parts of the grace period: the greatest age of an unnamed segment that is used again, and the
# greatest when the manifest names it. The rest is for clocks that differ.
_TAKEN, _NAMED = 0.5, 0.75


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


class _Segment:
    """A segment, or the beginning of one, that is being filled."""

    def __init__(self, number: int) -> None:
        self.name = str(number)  # until it is uploaded
        self.chunks: list[bytes] = []
        self.size = 0


class SegmentWriter:
    """Fills and uploads segments: the Target of a publisher's PieceWriter. Pieces of a kind, which
    are read together, are stored together. Used by one thread.
    """

    def __init__(self, objects: ObjectStore, grace: float) -> None:
        """grace: seconds, that of `prune`."""
        self._objects, self._grace = objects, grace
        self._young = time.time() - _TAKEN * grace
        self._begun = 0
        self._open = {kind: self._new() for kind in _KINDS}
        self._futures: list[Future[None]] = []
        self._places: dict[str, tuple[str, int]] = {}  # object, and offset there, by first name
        self._since: dict[str, float | None] = {}  # of each object, when it was stored: see `send`
        self.sent: list[int] = []  # bytes of each object that was uploaded

    def size(self, kind: Kind) -> int:
        """See Target."""
        return self._open[kind].size

    def room(self, kind: Kind) -> int:
        """See Target."""
        return SEGMENT_BYTES - self.size(kind)

    def append(self, kind: Kind, chunks: Sequence[bytes]) -> tuple[str, int]:
        """See Target; the name is that of a segment without an object yet: see `placed`. Raises
        StoreUnavailable.
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
        if sum(segment.size for segment in left) <= SEGMENT_BYTES:
            self._send(left)
        else:
            for segment in left:
                self._send([segment])
        self._open = {kind: self._new() for kind in _KINDS}
        while self._futures:
            self._futures.pop(0).result()

    def placed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Pieces with the names of their objects, once all are uploaded."""
        found = []
        for piece in pieces:
            name, start = self._places.get(piece.segment, (piece.segment, 0))
            found.append(piece._replace(segment=name, offset=start + piece.offset))
        return found

    def lasts(self) -> bool:
        """Are all segments stored, and none so old that pruning may remove it before a manifest
        names it? Raises StoreUnavailable.
        """
        oldest = time.time() - _NAMED * self._grace
        if any(since is not None and since < oldest for since in self._since.values()):
            return False
        return all(at_once(partial(is_there, self._objects), list(self._since)))

    def _new(self) -> _Segment:
        self._begun += 1
        return _Segment(self._begun)

    def _send(self, segments: Sequence[_Segment]) -> None:
        """Upload these as one object in the background. Only the first may have records, whose
        index says where they are.
        """
        if not segments:
            return
        while len(self._futures) >= _SENDS:
            self._futures.pop(0).result()

        def work(segments: Sequence[_Segment]) -> None:
            data = b"".join(chunk for segment in segments for chunk in segment.chunks)
            name, since = send(self._objects, data, young=self._young)
            self._since[name] = since
            if since is None:
                self.sent.append(len(data))
            start = 0
            for segment in segments:
                self._places[segment.name] = name, start
                start += segment.size

        self._futures += begin(work, [segments], name="memstore-publish")
