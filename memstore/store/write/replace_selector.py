"""Another selector for a memory that is there: what documents are found by is made anew, and takes
the place of the old at once.

The new lies beside the old, a transaction a document, until it is whole; the last transaction tells
that it is read from now on, and deletes the old. Readers see one of the two, never parts of both.
Interrupted, it goes on with the documents that are missing.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from memstore.disk.format.block_words import Words
from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.runs import RUN_BLOCKS, Run
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import NEXT, RunTable, part_of
from memstore.errors import CorruptMemory, InvalidInput
from memstore.store.index_entries import IndexEntries

Piece = tuple[int, Tensor | None, Sequence[Words] | None]
"""First block, landmarks [tokens, heads, width] and words of consecutive blocks."""

Find = Callable[[Document], Iterable[Piece]]


def replace_selector(
    catalog: Catalog, spec: IndexSpec, find: Find, progress: Callable[[int, int], None]
) -> RunTable:
    """Have `find` tell of every document what it is found by, and read that from now on; return
    where it lies. The caller holds the writer lock, and nothing is being written.

    Raises InvalidInput for what is not as the spec says, and what `find` raises: the memory is
    searched as before.
    """
    old, database = catalog.selector, catalog.database
    if old is None:
        raise InvalidInput(
            f"{database.path} is searched by landmark keys of its model; make a new memory for a "
            "selector"
        )
    new = old._replace(spec=spec, generation=1 - old.generation)
    with database.read() as txn:
        begun = RunTable.read(txn, old.geometry, NEXT)
        rows = [row for row in catalog.documents(txn) if row.state != "importing"]

    def begin(txn: Transaction) -> None:
        for row in rows:
            new.delete(txn, row.id)
        new.write(txn, NEXT)

    if begun != new:
        database.write(begin, beyond_limit=True)
    for number, row in enumerate(rows):
        progress(number, len(rows))
        if not _is_whole(catalog, new, row):
            with database.read() as txn:
                lengths = catalog.block_lengths(txn, row)
            runs = _runs(find(row), row, new, lengths)
            database.write(lambda txn: _put(txn, new, row.id, runs))  # noqa: B023 (runs now)
    progress(len(rows), len(rows))

    def end(txn: Transaction) -> None:
        for row in rows:
            old.delete(txn, row.id)
        new.write(txn)
        txn.delete("meta", NEXT)

    database.write(end, beyond_limit=True)
    return new


def _is_whole(catalog: Catalog, new: RunTable, row: Document) -> bool:
    with catalog.database.read() as txn:
        try:
            new.check(txn, row.id, {}, catalog.block_lengths(txn, row))
        except CorruptMemory:
            return False
    return True


def _put(txn: Transaction, new: RunTable, document: int, runs: Sequence[Run]) -> None:
    new.delete(txn, document)
    for run in runs:
        new.put(txn, document, part_of(new, run), run)


def _runs(pieces: Iterable[Piece], row: Document, new: RunTable, lengths: np.ndarray) -> list[Run]:
    """What was told of a whole document, in runs. Raises InvalidInput."""
    found = list(pieces)
    ends = [first for first, _, _ in found[1:]] + [row.blocks]
    if [first for first, _, _ in found[:1]] != [0] or ends != sorted({*ends}):
        raise InvalidInput(
            f"document {row.name!r}: expected pieces one after the other from block 0 on to block "
            f"{row.blocks}, got some that begin with {[first for first, _, _ in found][:10]}"
        )
    parts = []
    for (first, landmarks, words), end in zip(found, ends):
        assert new.spec is not None
        parts.append(IndexEntries.of(landmarks, words, new.spec, lengths[first:end]))
    whole = IndexEntries.joined(parts).runs(0)
    return [
        run.cut(first, first + RUN_BLOCKS[kind])
        for kind, run in whole.items()
        for first in range(0, run.end_block, RUN_BLOCKS[kind])
    ]
