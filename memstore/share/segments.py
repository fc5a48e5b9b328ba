"""Segments: immutable objects of up to 32 MB that hold pieces of one or many documents. A publisher
fills them: many small documents share one, a large document fills several, and segments are
uploaded while the next are filled. No passage is sent twice.

A segment is records as on disk, indexes of runs of records, and values (memstore.share.pieces), one
after the other; the manifest says where the pieces are. Its name is `segments/`, XXH3-128 of all
that, and a random number: a publisher finds again what an interrupted one sent, and sends under
another name what is old enough to be pruned.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from memstore.disk.format.record import WriteId
from memstore.disk.tables.passage_table import Digest
from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.calls import at_once, begin
from memstore.share.manifest import Entry
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Kind, Piece, RecordIndex, Value, encode_values, passages_index

SEGMENT_BYTES = 32 << 20  # of a segment, about
FOLDER = "segments"

_SENDS = 4  # segments that are uploaded at once
_PIECE_BYTES = 8 << 20  # values in a piece, about
# Parts of the grace period: the greatest age of an unnamed segment that is used again, and the
# greatest when the manifest names it. The rest is for clocks that differ.
_TAKEN, _NAMED = 0.5, 0.75

# Runs of passages


class Run:
    """Consecutive records of passages, with their index."""

    def __init__(self, piece: Piece | None = None) -> None:
        """piece: all of the run; None until its segment is sent."""
        self.piece = piece
        self.digests: list[Digest] = []  # of a new run, as are the next two
        self.sizes: list[list[int]] = []  # of each passage, by layer
        self.size = 0  # bytes of the records
        self._records: list[bytes | memoryview] = []

    def add(self, digest: Digest, records: Sequence[bytes | memoryview]) -> int:
        """Another passage, by its records in order of layers; the row that it has."""
        self.digests.append(digest)
        self.sizes.append(list(map(len, records)))
        self.size += sum(self.sizes[-1])
        self._records += records
        return len(self.digests) - 1

    def take_records(self) -> list[bytes | memoryview]:
        """Take the records out of memory."""
        records, self._records = self._records, []
        return records


class _Rows:
    """Consecutive blocks of a document that are consecutive rows of a run."""

    def __init__(self, block: int, run: Run, row: int) -> None:
        self.first, self.take, self.run, self.row = block, 1, run, row

    def extended(self, block: int, run: Run, row: int) -> bool:
        """Take the next block if it is the next row; return whether it is."""
        follows = self.run is run and (block - self.first, row - self.row) == (self.take,) * 2
        self.take += follows
        return follows

    @property
    def piece(self) -> Piece:
        assert self.run.piece is not None
        return self.run.piece._replace(first=self.first, take=self.take, row=self.row)


class PassageRuns:
    """Runs by passage, and the rows that documents refer to. Used by one thread."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._held: dict[Digest, tuple[Run, int]] = {}  # run and row
        self._learned: set[tuple[str, int]] = set()  # runs, by segment and offset
        self._rows: dict[str, list[_Rows]] = {}  # by document

    def learn(self, entries: Iterable[Entry]) -> None:
        """Add the passages of published documents. Raises CorruptMemory, StoreUnavailable."""
        new: list[Piece] = []
        for entry in entries:
            for piece in entry.pieces if entry.row.of_passages else ():
                where = piece.segment, piece.offset
                if piece.kind == "records" and where not in self._learned:
                    self._learned.add(where)
                    new.append(piece)
        for piece, index in zip(new, at_once(partial(_index, self._objects), new)):
            run = Run(piece)
            for row, digest in enumerate(index.writes):
                self._held.setdefault(digest, (run, row))

    def knows(self, digest: Digest) -> bool:
        """Is a passage uploaded, or about to be?"""
        return digest in self._held

    def add(self, digest: Digest, run: Run, records: Sequence[bytes | memoryview]) -> None:
        """Add a passage to a new run, by its records in order of layers."""
        self._held[digest] = run, run.add(digest, records)

    def refer(self, document: str, block: int, digest: Digest) -> None:
        """Note that a block of a document is this passage. Blocks come in order."""
        run, row = self._held[digest]
        rows = self._rows.setdefault(document, [])
        if not (rows and rows[-1].extended(block, run, row)):
            rows.append(_Rows(block, run, row))

    def pieces(self, document: str) -> list[Piece]:
        """The pieces of a document's passages, once all runs are sent."""
        return [rows.piece for rows in self._rows.get(document, ())]


def _index(objects: ObjectStore, piece: Piece) -> RecordIndex:
    """The index of a run."""
    data = objects.get_range(piece.segment, piece.offset, piece.length)
    return passages_index(objects, piece, data)


# One segment


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


# All segments of a publisher


class SegmentWriter:
    """Fills and uploads segments. Used by one thread."""

    def __init__(self, objects: ObjectStore, grace: float) -> None:
        """grace: seconds, that of `prune`."""
        self._objects, self._grace = objects, grace
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
        return SEGMENT_BYTES - self._records.size

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
        if self._records.size >= SEGMENT_BYTES:
            self._send(self._records)
            self._records = Segment()

    def add_values(self, document: str, kind: Kind, part: int, values: Sequence[Value]) -> None:
        """Add values of one kind and part, in order. Raises StoreUnavailable."""
        for some in _cut(values):
            segment = self._tokens if kind == "tokens" else self._keys
            segment.add_values(document, kind, part, some)
            if segment.size >= SEGMENT_BYTES:
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
        if sum(segment.size for segment in left) <= SEGMENT_BYTES:
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
