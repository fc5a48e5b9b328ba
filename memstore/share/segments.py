"""Segments: immutable objects of about 32 MB with values, records and contents of documents
(memstore.share.contents). Many small documents share one, a large document fills several, and full
segments are uploaded while the next ones are filled.

The name of a segment is `segments/`, the XXH3-128 of its bytes, and a random number: a publisher
can reuse what an interrupted one sent, and sends it under another name if it is old enough to be
pruned.
"""

import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.contents import Draft, Entry, Kind, Place, Segment, Stored
from memstore.share.object_store import ObjectStore
from memstore.share.parallel import at_once, begin, results

SEGMENT_BYTES = 32 << 20  # least bytes of a segment, except the last
FOLDER = "segments"

_SENDS = 4  # segments uploaded concurrently
_TAKEN = 0.5  # greatest age of a reused unnamed segment, as a fraction of the grace period


def is_whole(objects: ObjectStore, name: str) -> bool:
    """Is a segment in the store and undamaged? Reads all of it."""
    try:
        return name.rpartition("/")[0] == f"{FOLDER}/{xxh3_128_hexdigest(objects.get(name))}"
    except (ObjectNotFound, CorruptMemory):
        return False


def are_there(objects: ObjectStore, names: Collection[str]) -> bool:
    """Are these segments in the store? Raises StoreUnavailable."""

    def is_there(name: str) -> bool:
        return any(found.name == name for found in objects.names(name.rpartition("/")[0]))

    return all(at_once(is_there, list(names)))


class SegmentWriter:
    """Fills and uploads segments. Parts of one kind, which are read together, are stored together.
    For one thread.
    """

    def __init__(self, objects: ObjectStore, grace: float) -> None:
        """grace: seconds, the same as for `prune`."""
        self._objects = objects
        self._young = time.time() - _TAKEN * grace
        self._open: dict[Kind, Segment] = {}
        self._futures: list[Future[None]] = []
        self.sent: list[int] = []  # bytes of each uploaded object

    def append(self, kind: Kind, data: bytes) -> Stored:
        """Append a part of a kind. Raises StoreUnavailable."""
        segment = self._open.setdefault(kind, Segment())
        offset = segment.add(data)
        if segment.size >= SEGMENT_BYTES:
            self._send(self._open.pop(kind))
        return segment, offset, len(data)

    def finish(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Upload the rest, and the contents of all documents; return an entry for each draft.

        The rest shares an object with the contents if it has at most SEGMENT_BYTES. Raises
        StoreUnavailable.
        """
        kinds: list[Kind] = ["records", "landmarks", "tokens"]
        left = [self._open[kind] for kind in kinds if kind in self._open]
        if sum(segment.size for segment in left) > SEGMENT_BYTES:
            while left:
                self._send(left.pop())
        results(self._futures)
        entries, last = list[Entry](), Segment()
        for segment in left:
            segment.start = last.size
            for chunk in segment.chunks:
                last.add(chunk)
        waiting: list[tuple[Draft, Place]] = []
        for number, draft in enumerate(drafts, 1):
            data = draft.encode()
            waiting.append((draft, Place("", last.add(data), len(data), xxh3_64_intdigest(data))))
            if last.size >= SEGMENT_BYTES or number == len(drafts):
                self._upload(last)
                for segment in left:
                    segment.name = last.name
                entries += [draft.entry(place._replace(name=last.name)) for draft, place in waiting]
                waiting, left, last = [], [], Segment()
        return entries

    def _send(self, segment: Segment) -> None:
        """Upload a segment in the background."""
        results(self._futures[: -(_SENDS - 1)])
        self._futures += begin(self._upload, [segment])

    def _upload(self, segment: Segment) -> None:
        """Name a segment, and upload it unless the store has it."""
        data = b"".join(segment.chunks)
        segment.chunks = []
        folder = f"{FOLDER}/{xxh3_128_hexdigest(data)}"
        name = f"{folder}/{os.urandom(6).hex()}"
        for found in self._objects.names(folder):
            if found.modified >= self._young:  # an older one may be pruned at any time
                if found.size == len(data) and is_whole(self._objects, found.name):
                    segment.name = found.name
                    return
                name = found.name  # overwrite a damaged one, which manifests may name
        self._objects.put(name, data)
        self.sent.append(len(data))
        segment.name = name
