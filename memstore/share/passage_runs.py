"""Passages in segments by their digest: the run of records that holds each, uploaded already or
about to be, so that no passage is sent twice.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from memstore.disk.tables.passage_table import Digest
from memstore.share.document_pages import Entry
from memstore.share.pieces import Piece, RecordIndex
from memstore.share.read_pieces import passages_index
from memstore.share.daemon_threads import at_once
from memstore.share.object_store import ObjectStore


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
        new: dict[str, dict[int, Piece]] = {}
        for entry in entries:
            for piece in entry.pieces if entry.row.of_passages else ():
                where = piece.segment, piece.offset
                if piece.kind == "records" and where not in self._learned:
                    self._learned.add(where)
                    new.setdefault(piece.segment, {})[piece.offset] = piece
        for pieces, indexes in zip(
            new.values(), at_once(partial(_indexes, self._objects), [*new.values()])
        ):
            for piece, index in zip(pieces.values(), indexes):
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


def _indexes(objects: ObjectStore, pieces: dict[int, Piece]) -> list[RecordIndex]:
    """The indexes of runs of one segment, by offset."""
    (segment,) = {piece.segment for piece in pieces.values()}
    data = objects.get_ranges(segment, [(p.offset, p.length) for p in pieces.values()])
    return [passages_index(objects, piece, part) for piece, part in zip(pieces.values(), data)]
