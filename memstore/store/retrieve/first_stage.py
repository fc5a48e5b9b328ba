"""The first stage of a search over very many token landmarks: lists stored with the memory propose
the passages that are worth an exact score (memstore.index.token_lists).

All passages of documents that came, or changed, since the lists were made are scored exactly.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.document import Document
from memstore.disk.format.runs import Run
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory, InvalidInput, ObjectNotFound
from memstore.index.block_rows import Scope
from memstore.index.index_file import Unusable
from memstore.index.inverted_lists import has_faiss
from memstore.index.passage_files import Covered, PassageDirectory, PassageLists, covered_by, decode
from memstore.index.token_lists import CODE, SAMPLED, TRAINED, build, lists_of
from memstore.index.word_index import HeldPostings, WordsBeside, keys_of
from memstore.store.retrieve.listed_passages import (
    ListedPassages,
    Shortlist,
    state_of,
    tokens_covered,
)
from memstore.store.retrieve.loading import by_tokens
from memstore.store.retrieve.selector_index import SelectorIndex

PAYING = 1 << 21  # tokens of a scope from where on two stages take less than one
PROPOSED = 1000, 5000  # passages of the lists that are scored exactly, at least and at most

_NEW = 1 / 4  # of the tokens in lists: lists are rebuilt when so many more have come
_AT_ONCE = 1 << 18  # tokens of documents that are read together

# Errors that mean no more than that there are no lists; not that a store is unavailable.
_UNUSABLE = Unusable, InvalidInput, OSError, CorruptMemory, ObjectNotFound

Progress = Callable[[int, int], None]  # called with (tokens done, tokens)

_log = logging.getLogger("memstore")


class FirstStage:
    """The lists of one memory's selector. Safe for several threads."""

    def __init__(self, table: RunTable, catalog: Catalog, place: PassageDirectory) -> None:
        """place: where they are stored."""
        assert table.spec is not None
        self._table, self._spec, self._catalog = table, table.spec, catalog
        self._place = place
        self._opening = threading.Lock()
        self._listed: ListedPassages | None = None
        self._stamp: Hashable = None  # of what it was read from

    @property
    def possible(self) -> bool:
        """Can lists be made of what the selector stores?"""
        return self._spec.width > 0 and self._spec.width % (2 * CODE) == 0

    def shortlist(
        self,
        question: tuple[Tensor, Tensor, WordsBeside | None],
        scope: Scope,
        selected: SelectorIndex,
        rows: Mapping[int, Document],
    ) -> Shortlist | None:
        """See Retrieval.shortlist; question: q, weights, beside; rows: the memory's ready
        documents.
        """
        listed = self._open(rows, selected)
        if listed is None or (within := listed.within(scope, rows)).tokens < PAYING:
            return None
        return listed.propose(question, selected, scope, within, PROPOSED)

    def close(self) -> None:
        """Drop the lists; the next search reads the file again."""
        self._listed = self._stamp = None

    @property
    def bytes(self) -> int:
        """Main memory that the lists take."""
        listed = self._listed
        return 0 if listed is None else listed.lists.bytes

    def _open(self, rows: Mapping[int, Document], selected: SelectorIndex) -> ListedPassages | None:
        """The lists, read again where others are stored by now, and their words. Raises
        StoreUnavailable.
        """
        with self._opening:
            stamp = self._place.stamp
            if stamp == self._stamp or not self.possible or not has_faiss():
                return self._listed
            self._listed = found = None
            try:
                found = decode(self._place.content(), self._spec.digest, self._spec.width)
            except FileNotFoundError:
                pass
            except _UNUSABLE as problem:
                _log.warning(
                    "%s: %s; every passage is scored until `memstore index` has run",
                    self._place.name,
                    problem,
                )
            self._stamp = stamp
            if found is not None:
                self._listed = ListedPassages(found, self._table, self._catalog)
                self._listed.give_words(selected, [*rows.values()])
            return self._listed

    def due(self, rows: Mapping[int, Document]) -> bool:
        """Are lists to be made, or rebuilt?"""
        tokens = sum(row.tokens for row in [*rows.values()])
        if tokens < PAYING or not self.possible or not has_faiss():
            return False
        held = tokens_covered(self._covered(), {row.name: row for row in [*rows.values()]})
        return tokens - held >= max(PAYING, _NEW * held)

    def tells_of_gone(self, rows: Mapping[int, Document]) -> bool:
        """Are there lists that cannot be read, or of documents that are gone or have changed?"""
        there, covered = {row.name: row for row in [*rows.values()]}, self._covered()
        gone = any(state_of(there.get(one.name)) != one.state for one in covered)
        return self._place.stamp is not None and (gone or not covered)

    def _covered(self) -> list[Covered]:
        """The documents of lists that can be read."""
        try:
            return covered_by(self._place.header(), self._spec.digest)
        except _UNUSABLE:
            return []

    def build(self, rows: Mapping[int, Document], progress: Progress | None) -> dict[str, Any]:
        """Make lists of these documents, all that are ready, and store them; return what was made,
        nothing where that is impossible, or would not pay. rows: as they are at any time.

        Raises CorruptMemory, InvalidInput (FAISS is missing), StorageFull, ReadOnlyMemory,
        StoreUnavailable.
        """
        documents = sorted((row for row in [*rows.values()] if row.blocks), key=lambda row: row.id)
        if not self.possible or sum(row.tokens for row in documents) < PAYING:
            return {}
        made = _make(self._catalog, self._table, documents, progress or (lambda done, tokens: None))
        if made is None:
            return {}
        return {
            "passages": len(made.lists.lengths),
            "landmarks": int(made.lists.ends[-1]),
            "lists": made.lists.index.nlist,
            "bytes": self._place.write(made),
        }


def _make(
    catalog: Catalog, table: RunTable, documents: list[Document], progress: Progress
) -> PassageLists | None:
    """Lists of documents, but for those that change concurrently; None where too few landmarks are
    left. Raises CorruptMemory, InvalidInput (FAISS is missing), StoreUnavailable.
    """
    assert table.spec is not None
    tokens, blocks = (sum(each) for each in zip(*((row.tokens, row.blocks) for row in documents)))
    step = max(1, tokens // (TRAINED * lists_of(tokens)))
    some = [run.landmarks[::step].copy() for _, run, _ in _read(catalog, table, documents, False)]
    if sum(map(len, some)) < lists_of(tokens):
        return None
    covered: list[Covered] = []
    words: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # keys, counts, lengths of passages

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        done = first = 0
        progress(done, tokens)
        for row, run, found in _read(catalog, table, documents, True):
            covered.append(Covered(row.name, row.blocks, state_of(row)))
            if found is not None:
                block = np.repeat(np.arange(row.blocks), found.sizes)
                lengths = np.bincount(block, found.counts, minlength=row.blocks)
                keys = keys_of(found.hashes, block + first)
                words.append((keys, found.counts.astype(np.uint16), lengths.astype(np.float32)))
            yield run.landmarks, run.sizes
            done, first = done + row.tokens, first + row.blocks
            progress(done, tokens)

    lists = build(np.concatenate(some), tokens, max(1, blocks // SAMPLED), batches())
    if not covered:
        return None
    of_words = None
    if words:
        keys, counts, lengths = map(np.concatenate, zip(*words))
        of_words = lengths, HeldPostings.of(keys, counts)
    return PassageLists(lists, of_words, covered, table.spec.digest)


def _read(
    catalog: Catalog, table: RunTable, documents: list[Document], with_words: bool
) -> Iterator[tuple[Document, Run, BlockWords | None]]:
    """Token landmarks of unchanged documents, and their words if the selector stores any."""
    assert table.spec is not None
    for rows in by_tokens(documents, _AT_ONCE):
        found: list[tuple[Document, Run, BlockWords | None]] = []
        with catalog.database.read() as txn:
            catalog.bring(txn, [row.id for row in rows], "landmarks")
            for row in rows:
                if state_of(catalog.row(txn, row.id)) == state_of(row):
                    run = table.tokens(txn, row.id)
                    words = table.words(txn, row.id) if with_words and table.spec.words else None
                    sizes = run.sizes if words is None else words.sizes
                    if not len(run.sizes) == len(sizes) == row.blocks:
                        raise CorruptMemory(
                            f"token landmarks or words of {row.name!r} are missing; run verify"
                        )
                    found.append((row, run, words))
        yield from found
