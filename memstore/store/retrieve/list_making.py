"""Making what the passages of documents are found by in two stages (memstore.index.passage_files):
lists of token landmarks, and words in order.
"""

from collections.abc import Callable, Iterator

import numpy as np

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.document import Document
from memstore.disk.format.runs import TokenRun
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory
from memstore.index.passage_files import PassageWords
from memstore.index.token_lists import Building, TokenLists
from memstore.index.word_postings import HeldPostings, keys_of
from memstore.store.retrieve.listed_passages import state_of

_PIECE = 1 << 18  # tokens that are put into lists at once
_THIN = 8  # one of so many landmarks of a run is trained with


def make_lists(
    catalog: Catalog,
    table: RunTable,
    documents: list[Document],
    progress: Callable[[int, int], None] | None,
) -> tuple[TokenLists, list[Document]]:
    """Lists of ready documents, and which of them are in these: not those that change meanwhile.
    progress: called with (tokens done, tokens). Raises CorruptMemory, InvalidInput (FAISS is
    missing).
    """
    tokens = sum(row.tokens for row in documents)
    one_of = tokens / Building.wanted(tokens)
    some = np.concatenate([*_some(catalog, table, documents, one_of)])
    building, done = Building(some, tokens, sum(row.blocks for row in documents)), 0
    listed: list[Document] = []
    for rows, landmarks, lengths in _pieces(catalog, table, documents):
        if progress is not None:
            progress(done, tokens)
        building.add(landmarks, lengths)
        listed += rows
        done += len(landmarks)
    if progress is not None:
        progress(done, tokens)
    return building.end(), listed


def _some(
    catalog: Catalog, table: RunTable, documents: list[Document], one_of: float
) -> Iterator[np.ndarray]:
    """One of so many landmarks of documents: every eighth of runs that lie apart."""
    thin = min(_THIN, max(1, int(one_of)))
    seen, next_at = 0, 0.0
    with catalog.database.read() as txn:
        for row in documents:
            for run in table.token_runs(txn, row.id):
                if seen >= next_at:
                    yield run.landmarks[::thin, 0]
                    next_at += len(run.landmarks) * one_of / thin
                seen += len(run.landmarks)


def _pieces(
    catalog: Catalog, table: RunTable, documents: list[Document]
) -> Iterator[tuple[list[Document], np.ndarray, np.ndarray]]:
    """Some documents, their landmarks int8 [tokens, width], and the tokens of each passage."""
    rows: list[Document] = []
    parts: list[TokenRun] = []
    for row in documents:
        with catalog.database.read() as txn:
            if not _same(catalog, txn, row):
                continue
            run = table.tokens(txn, row.id)
        if len(run.lengths) != row.blocks:
            raise CorruptMemory(f"token landmarks of {row.name!r} are missing; run verify")
        rows.append(row)
        parts.append(run)
        if sum(len(part.landmarks) for part in parts) >= _PIECE:
            yield rows, *_joined(parts)
            rows, parts = [], []
    if parts:
        yield rows, *_joined(parts)


def _joined(parts: list[TokenRun]) -> tuple[np.ndarray, np.ndarray]:
    landmarks = np.concatenate([part.landmarks[:, 0] for part in parts])
    return landmarks, np.concatenate([part.lengths for part in parts])


def sort_words(catalog: Catalog, table: RunTable, documents: list[Document]) -> PassageWords | None:
    """The words of documents, none of those that change meanwhile; None of a selector that keeps
    none. Raises CorruptMemory.
    """
    if table.spec is None or not table.spec.words:
        return None
    keys, counts, lengths, row = [], [], [], 0
    for document in documents:
        words = BlockWords.joined([])
        with catalog.database.read() as txn:
            same = _same(catalog, txn, document)
            if same:
                words = table.words(txn, document.id)
        if same and len(words.sizes) != document.blocks:
            raise CorruptMemory(f"words of {document.name!r} are missing; run verify")
        block = np.repeat(np.arange(len(words.sizes)), words.sizes)
        keys.append(keys_of(words.hashes, block + row))
        counts.append(words.counts.astype(np.uint16))
        of_blocks = np.bincount(block, words.counts, minlength=document.blocks)
        lengths.append(of_blocks.astype(np.float32))
        row += document.blocks
    postings = HeldPostings.of(np.concatenate(keys), np.concatenate(counts))
    return PassageWords(np.concatenate(lengths), postings)


def _same(catalog: Catalog, txn: Transaction, row: Document) -> bool:
    return state_of(catalog.row(txn, row.id)) == state_of(row)
