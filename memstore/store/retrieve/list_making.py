"""Making what the passages of documents are found by in two stages (memstore.index.passage_files):
lists of token landmarks, and words in order.
"""

from collections.abc import Callable, Iterator

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory
from memstore.index.passage_files import PassageWords
from memstore.index.token_lists import Building, TokenLists
from memstore.index.word_postings import HeldPostings, keys_of
from memstore.store.retrieve.listed_passages import state_of
from memstore.store.retrieve.short_documents import by_tokens

_AT_ONCE = 1 << 18  # tokens of documents that are read together
_THIN = 8  # one of so many landmarks of a run is trained with


def make(
    catalog: Catalog,
    table: RunTable,
    documents: list[Document],
    progress: Callable[[int, int], None] | None,
) -> tuple[TokenLists, PassageWords | None, list[Document]] | None:
    """Lists and words (None of a selector that keeps none) of ready documents, and which of them
    they are of: not those that change meanwhile; None where too little is left. progress: called
    with (tokens done, tokens).
    Raises CorruptMemory, InvalidInput (FAISS is missing), StoreUnavailable.
    """
    tokens = sum(row.tokens for row in documents)
    one_of = tokens / Building.wanted(tokens)
    sampled = [*_some(catalog, table, documents, one_of)]
    if sum(map(len, sampled)) < Building.least(tokens):
        return None
    some = np.concatenate(sampled)
    building, done = Building(some, tokens, sum(row.blocks for row in documents)), 0
    assert table.spec is not None
    words = _Words() if table.spec.words else None
    listed: list[Document] = []
    for rows in by_tokens(documents, _AT_ONCE):
        if progress is not None:
            progress(done, tokens)
        with catalog.database.read() as txn:
            catalog.bring(txn, [row.id for row in rows], "landmarks")
            same = [row for row in rows if _same(catalog, txn, row)]
            if same:
                building.add(*_landmarks(table, txn, same))
                if words is not None:
                    words.add(table, txn, same)
        listed += same
        done += sum(row.tokens for row in rows)
    if progress is not None:
        progress(done, tokens)
    if not listed:
        return None
    return building.end(), None if words is None else words.end(), listed


def _some(
    catalog: Catalog, table: RunTable, documents: list[Document], one_of: float
) -> Iterator[np.ndarray]:
    """One of so many landmarks of documents: every eighth of runs that lie apart."""
    thin = min(_THIN, max(1, int(one_of)))
    seen, next_at = 0, 0.0
    for rows in by_tokens(documents, _AT_ONCE):
        if seen + sum(row.tokens for row in rows) < next_at:
            seen += sum(row.tokens for row in rows)
            continue
        with catalog.database.read() as txn:
            catalog.bring(txn, [row.id for row in rows], "landmarks")
            for row in rows:
                for run in table.token_runs(txn, row.id):
                    if seen >= next_at:
                        yield run.landmarks[::thin, 0]
                        next_at += len(run.landmarks) * one_of / thin
                    seen += len(run.landmarks)


def _landmarks(
    table: RunTable, txn: Transaction, rows: list[Document]
) -> tuple[np.ndarray, np.ndarray]:
    """The landmarks int8 [tokens, width] of documents, and the tokens of each passage."""
    runs = [table.tokens(txn, row.id) for row in rows]
    for row, run in zip(rows, runs):
        if len(run.lengths) != row.blocks:
            raise CorruptMemory(f"token landmarks of {row.name!r} are missing; run verify")
    landmarks = np.concatenate([run.landmarks[:, 0] for run in runs])
    return landmarks, np.concatenate([run.lengths for run in runs])


class _Words:
    """The words of documents one behind the other."""

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._rows = 0

    def add(self, table: RunTable, txn: Transaction, rows: list[Document]) -> None:
        """The next documents."""
        for row in rows:
            words = table.words(txn, row.id)
            if len(words.sizes) != row.blocks:
                raise CorruptMemory(f"words of {row.name!r} are missing; run verify")
            block = np.repeat(np.arange(row.blocks), words.sizes)
            self._keys.append(keys_of(words.hashes, block + self._rows))
            self._counts.append(words.counts.astype(np.uint16))
            of_blocks = np.bincount(block, words.counts, minlength=row.blocks)
            self._lengths.append(of_blocks.astype(np.float32))
            self._rows += row.blocks

    def end(self) -> PassageWords:
        """All of them."""
        keys = np.concatenate([np.zeros(0, np.uint64), *self._keys])
        counts = np.concatenate([np.zeros(0, np.uint16), *self._counts])
        lengths = np.concatenate([np.zeros(0, np.float32), *self._lengths])
        return PassageWords(lengths, HeldPostings.of(keys, counts))


def _same(catalog: Catalog, txn: Transaction, row: Document) -> bool:
    return state_of(catalog.row(txn, row.id)) == state_of(row)
