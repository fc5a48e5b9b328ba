"""What blocks of a document that is being written will be found by, in runs on a fixed grid, so
that what is stored does not depend on when it was committed.
"""

from collections.abc import Iterator, Sequence
from itertools import dropwhile

from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, Run, joined, run_of
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.store.write.chunk import Chunk


class LatestRuns:
    """The latest of every part: what the next commit writes again with its own, and what reading
    on needs.
    """

    def __init__(self, catalog: Catalog, document: Document, blocks: int, keep: int) -> None:
        """Of a document of which `blocks` blocks stay and, of layers without memory, those from
        `keep` on. Raises CorruptMemory.
        """
        signature, table = catalog.signature, catalog.runs
        self._kinds = table.parts(document.layers_of(signature))
        of_layers = table.spec is None
        self._other = set(document.other_layers(signature)) if of_layers else set[int]()
        self._pieces: dict[int, list[Run]] = {}  # that follow each other
        with catalog.database.read() as txn:
            for part, kind in self._kinds.items():
                oldest = run_of(kind, blocks)
                if of_layers:
                    oldest = min(oldest, keep)
                firsts = range(run_of(kind, oldest), blocks, RUN_BLOCKS[kind])
                runs = [table.run(txn, document.id, part, first) for first in firsts]
                self._pieces[part] = [run.cut(0, blocks) for run in runs if run is not None]
                needed = keep if part in self._other else oldest
                if self._count(part, needed, blocks) != blocks - needed:
                    raise CorruptMemory(
                        f"{kind} landmarks of document {document.name!r} before block {blocks}, "
                        f"part {part}, are missing; run verify"
                    )

    def add(self, chunk: Chunk, committed: int, keep: int) -> None:
        """Remember what is kept of a chunk's blocks, and forget what is no longer needed once
        `committed` blocks are; keep: as in __init__.
        """
        for part, run in chunk.runs.items():
            first = min(run_of(self._kinds[part], committed), keep)
            # A new list: the committing thread may be reading the old one.
            kept = dropwhile(lambda piece: piece.end_block <= first, self._pieces[part])  # noqa: B023 (read now)
            self._pieces[part] = [*kept, run]

    def latest(self, part: int, first: int, end: int) -> Run | None:
        """What is remembered of blocks first .. end; None where that is nothing."""
        some = [
            run.cut(first, end)
            for run in self._pieces[part]
            if run.first_block < end and run.end_block > first
        ]
        return joined(some[0].first_block, some) if some else None

    def to_write(self, chunks: Sequence[Chunk], keep: int) -> Iterator[tuple[int, Run]]:
        """What a commit of these chunks writes: parts and runs."""
        begin, end = chunks[0].first_block, chunks[-1].end_block
        for part, kind in self._kinds.items():
            oldest = max(begin, keep) if part in self._other else begin
            for first in range(run_of(kind, oldest), end, RUN_BLOCKS[kind]):
                run = self.latest(part, first, min(first + RUN_BLOCKS[kind], end))
                assert run is not None
                yield part, run

    def _count(self, part: int, first: int, end: int) -> int:
        run = self.latest(part, first, end) if first < end else None
        return 0 if run is None else run.end_block - run.first_block
