"""Segments of a publisher: many small documents share one, a large document fills several, and
segments are uploaded while the next are filled.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from memstore.disk.format.record import WriteId
from memstore.share.passage_runs import PassageRuns, Run
from memstore.share.pieces import Kind, Piece, Value
from memstore.share.segments import Segment, is_there, send
from memstore.share.daemon_threads import at_once, begin
from memstore.share.object_store import ObjectStore

_SENDS = 4  # segments that are uploaded at once
_PIECE_BYTES = 8 << 20  # values in a piece, about
# Parts of the grace period: the greatest age of an unnamed segment that is used again, and the
# greatest when the manifest names it. The rest is for clocks that differ.
_TAKEN, _NAMED = 0.5, 0.75


class SegmentWriter:
    """Fills and uploads segments. Used by one thread."""

    def __init__(self, objects: ObjectStore, *, limit: int, grace: float) -> None:
        """limit: bytes of a segment, about. grace: seconds, that of `prune`."""
        self._objects, self._limit, self._grace = objects, limit, grace
        self._young = time.time() - _TAKEN * grace
        # Data that is read together is stored together.
        self._records, self._keys, self._tokens = (Segment() for _ in range(3))
        self._futures: list[Future[None]] = []
        self.runs = PassageRuns(objects)
        self._pieces: dict[str, list[Piece]] = {}  # by document, without records of passages
        self.sent: list[int] = []  # bytes of each uploaded segment
        self._since: dict[str, float | None] = {}  # of each segment, when it was stored: see `send`

    @property
    def room(self) -> int:
        """Bytes of records until a segment is full."""
        return self._limit - self._records.size

    def pieces(self, document: str) -> list[Piece]:
        """The pieces of a document, once `flush` has returned."""
        return [*self._pieces.get(document, ()), *self.runs.pieces(document)]

    def reuse(self, document: str, pieces: Iterable[Piece]) -> None:
        """Add pieces to a document that are published already."""
        self._pieces.setdefault(document, []).extend(pieces)

    def add_run(self, run: Run, layers: Sequence[int]) -> None:
        """Add the records of new passages, if there are any. Raises StoreUnavailable."""
        if run.digests:
            sizes = np.array(run.sizes, dtype=np.uint32)
            self.add_records(run, run.digests, 0, layers, sizes, run.take_records())

    def add_records(
        self,
        owner: str | Run,
        writes: Sequence[WriteId],
        first: int,
        layers: Sequence[int],
        sizes: np.ndarray,
        records: Sequence[bytes | memoryview],
    ) -> None:
        """As Segment.add_records. Raises StoreUnavailable."""
        self._records.add_records(owner, writes, first, layers, sizes, records)
        if self._records.size >= self._limit:
            self._send(self._records)
            self._records = Segment()

    def add_values(self, document: str, kind: Kind, part: int, values: Sequence[Value]) -> None:
        """Add values of one kind and part, in order. Raises StoreUnavailable."""
        for some in _cut(values):
            segment = self._tokens if kind == "tokens" else self._keys
            segment.add_values(document, kind, part, some)
            if segment.size >= self._limit:
                self._send(segment)
                if kind == "tokens":
                    self._tokens = Segment()
                else:
                    self._keys = Segment()

    def flush(self) -> None:
        """Upload the rest, as one segment if it is small, and wait for all uploads. Raises
        StoreUnavailable.
        """
        left = [self._records, self._keys, self._tokens]
        if sum(segment.size for segment in left) <= self._limit:
            for other in left[1:]:
                left[0].absorb(other)
            left = left[:1]
        for segment in left:
            if segment.pieces:
                self._send(segment)
        self._wait(0)

    def lasts(self) -> bool:
        """Are all segments stored, and none so old that pruning may remove it before a manifest
        names it? Raises StoreUnavailable.
        """
        oldest = time.time() - _NAMED * self._grace
        if any(since is not None and since < oldest for since in self._since.values()):
            return False
        return all(at_once(partial(is_there, self._objects), list(self._since)))

    def _wait(self, most: int) -> None:
        while len(self._futures) > most:
            self._futures.pop(0).result()

    def _send(self, segment: Segment) -> None:
        self._wait(_SENDS - 1)

        def work(segment: Segment) -> None:
            data = segment.encode()
            name, since = send(self._objects, data, young=self._young)
            self._since[name] = since
            if since is None:
                self.sent.append(len(data))
            for owner, piece in segment.pieces:
                piece = piece._replace(segment=name)
                if isinstance(owner, Run):
                    owner.piece = piece
                else:
                    self._pieces.setdefault(owner, []).append(piece)

        self._futures += begin(work, [segment], name="memstore-publish")


def _cut(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Cut values into pieces of a bounded size."""
    first, size = 0, 0
    for at, value in enumerate(values):
        size += len(value.value)
        if size >= _PIECE_BYTES:
            yield values[first : at + 1]
            first, size = at + 1, 0
    if first < len(values):
        yield values[first:]
