"""What blocks of a document that is being written will be found by, in runs on a fixed grid, so
that what is stored does not depend on when it was committed.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.runs import RUN_BLOCKS, Kind, Run, TokenRun, WordRun, kinds_of
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.store.index_entries import IndexEntries


class SelectorRuns:
    """The latest of what was given: what the next commit writes again with its own."""

    def __init__(self, catalog: Catalog, document: int, blocks: int) -> None:
        """Of a document of which `blocks` blocks stay. Raises CorruptMemory."""
        self._pieces: dict[Kind, list[Run]] = {}  # that follow each other
        table = catalog.selector
        for kind in [] if table is None else kinds_of(table.form):
            first = run_of(kind, blocks)
            self._pieces[kind] = []
            if table is None or first == blocks:
                continue
            with catalog.database.read() as txn:
                run = table.run(txn, document, kind, first)
            cut = None if run is None else run.cut(first, blocks)
            if cut is None or cut.end_block != blocks:
                raise CorruptMemory(
                    f"{kind} landmarks of document {document} before block {blocks} are missing; "
                    "run verify"
                )
            self._pieces[kind].append(cut)

    def add(self, first_block: int, entries: IndexEntries, committed: int) -> None:
        """Remember what is kept of a chunk's blocks, and forget what is no longer needed once
        `committed` blocks are.
        """
        new: dict[Kind, Run] = {}
        if entries.landmarks is not None:
            new["token"] = TokenRun(first_block, entries.landmarks, entries.lengths)
        if entries.words is not None:
            new["words"] = WordRun(first_block, entries.words)
        for kind, run in new.items():
            first = run_of(kind, committed)
            # A new list: the committing thread may be reading the old one.
            kept = [piece for piece in self._pieces[kind] if piece.end_block > first]
            self._pieces[kind] = [*kept, run]

    def to_write(self, first_block: int, end_block: int) -> Iterator[Run]:
        """What a commit of these blocks writes."""
        for kind, pieces in self._pieces.items():
            for first in range(run_of(kind, first_block), end_block, RUN_BLOCKS[kind]):
                end = min(first + RUN_BLOCKS[kind], end_block)
                yield _join(
                    first,
                    [
                        run.cut(first, end)
                        for run in pieces
                        if run.first_block < end and run.end_block > first
                    ],
                )


def runs_of(entries: IndexEntries) -> Iterator[Run]:
    """What is kept of a document from its first block on, in runs."""
    lengths, landmarks, words = entries
    whole: dict[Kind, Run] = {}
    if landmarks is not None:
        whole["token"] = TokenRun(0, landmarks, lengths)
    if words is not None:
        whole["words"] = WordRun(0, words)
    for kind, run in whole.items():
        step = RUN_BLOCKS[kind]
        for first in range(0, run.end_block, step):
            yield run.cut(first, first + step)


def run_of(kind: Kind, block: int) -> int:
    """First block of the run that a block is of."""
    return block // RUN_BLOCKS[kind] * RUN_BLOCKS[kind]


def _join(first_block: int, parts: Sequence[Run]) -> Run:
    words = [part.words for part in parts if isinstance(part, WordRun)]
    if words:
        return WordRun(first_block, BlockWords.joined(words))
    tokens = [part for part in parts if isinstance(part, TokenRun)]
    return TokenRun(
        first_block,
        np.concatenate([part.landmarks for part in tokens]),
        np.concatenate([part.lengths for part in tokens]),
    )
