"""Documents that are read many at once. Of short ones every part of what they are found by is one
run; to read a hundred thousand of these one after the other takes seconds.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from memstore.disk.format.document import Document
from memstore.disk.format.joined_runs import Size
from memstore.disk.format.runs import RUN_BLOCKS, Kind, Run
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.run_table import RunTable

_AT_ONCE = 4096  # documents


def batches(rows: Sequence[Document], kind: Kind) -> Iterator[list[Document]]:
    """These documents in their order: those that have one run of a kind together, others alone."""

    def is_short(row: Document) -> bool:
        return 0 < row.blocks <= RUN_BLOCKS[kind] and row.layers is None

    for short, some in groupby(rows, is_short):
        together, size = list(some), _AT_ONCE if short else 1
        yield from (together[at : at + size] for at in range(0, len(together), size))


def by_tokens(rows: Sequence[Document], least: int) -> Iterator[list[Document]]:
    """These documents in their order, as many together as have so many tokens."""
    some: list[Document] = []
    tokens = 0
    for row in rows:
        some.append(row)
        tokens += row.tokens
        if tokens >= least:
            yield some
            some, tokens = [], 0
    if some:
        yield some


def read_whole(
    txn: Transaction, table: RunTable, part: int, rows: Sequence[Document]
) -> Run | None:
    """One run of all blocks of documents that `batches` puts together: see RunTable.whole."""
    sizes = [Size(row.blocks, row.tokens) for row in rows]
    return table.whole(txn, part, [row.id for row in rows], sizes)
