"""The first stage of a search over very many token landmarks: lists beside the memory say which
passages are worth an exact score (memstore.index.token_lists).

Documents that came, or changed, since the lists were made are scored exactly, all of them.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory, InvalidInput, ObjectNotFound
from memstore.index.block_rows import Scope
from memstore.index.faiss.faiss_head import has_faiss
from memstore.index.index_file import Unusable
from memstore.index.passage_files import Covered, ListsHead, Made, PassageWords, Place
from memstore.index.token_lists import CODE, Building, TokenLists
from memstore.index.word_index import HeldPostings, keys_of
from memstore.store.retrieve.listed_passages import (
    Asked,
    ListedPassages,
    Shortlist,
    state_of,
    tokens_covered,
)
from memstore.store.retrieve.loading import by_tokens
from memstore.store.retrieve.selector_index import SelectorIndex

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
                        yield run.landmarks[::thin]
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
    landmarks = np.concatenate([run.landmarks for run in runs])
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


PAYING = 1 << 21  # tokens of a scope from where on two stages take less than one
PROPOSED = 1000, 5000  # passages of the lists that are scored exactly, at least and at most
_NEW = 1 / 4  # of the tokens in lists: so many more are worth making them anew

# by which lists cannot be used, but for a store that is away
_UNUSABLE = Unusable, InvalidInput, OSError, CorruptMemory, ObjectNotFound

_log = logging.getLogger("memstore")


class FirstStage:
    """The lists of one memory's selector. Safe for several threads."""

    def __init__(self, table: RunTable, catalog: Catalog, place: Place) -> None:
        """place: where they are kept."""
        assert table.spec is not None
        self._table, self._spec, self._catalog = table, table.spec, catalog
        self._place = place
        self._lock, self._opening = threading.RLock(), threading.Lock()
        self._listed: ListedPassages | None = None
        self._stamp: Hashable = None  # of what it was read from

    @property
    def possible(self) -> bool:
        """Can lists be made of what the selector keeps?"""
        return self._spec.width > 0 and self._spec.width % (2 * CODE) == 0

    def shortlist(
        self, asked: Asked, scope: Scope, selected: SelectorIndex, rows: Mapping[int, Document]
    ) -> Shortlist | None:
        """See MemoryStore.shortlist; rows: the memory's ready documents."""
        problem: Exception | None = None
        for _ in range(2):  # again where others were made meanwhile
            listed = self._open(rows, selected)
            if listed is None or listed.tokens_of(scope) < PAYING:
                break
            rare = asked.beside and selected.rare(asked.beside.words, scope)
            try:
                found = listed.propose(asked, rare, scope, PROPOSED)
            except (CorruptMemory, ObjectNotFound) as error:
                problem = error
                with self._lock:
                    if self._listed is listed:  # do without until there are others
                        self._listed = None
                continue
            if found is None:
                return None
            words = (asked.beside.words, rare.spread) if asked.beside and rare else None
            return Shortlist(selected, listed, found, scope, words)
        if problem is not None:
            self._warn(problem)
        return None

    def follow(self, document: int, row: Document | None) -> None:
        """A document has another row by now, or none."""
        with self._lock:
            if self._listed is not None:
                self._listed.follow(document, row)

    def close(self) -> None:
        """Hold nothing; what is kept is read again when it is asked for."""
        with self._lock:
            self._listed = self._stamp = None

    @property
    def bytes(self) -> int:
        """Main memory that the lists take."""
        with self._lock:
            return 0 if self._listed is None else self._listed.lists.bytes

    def _open(self, rows: Mapping[int, Document], selected: SelectorIndex) -> ListedPassages | None:
        """The lists, read anew where others are kept by now, and words with them. Raises
        StoreUnavailable.
        """
        with self._opening:
            stamp = self._place.stamp
            if stamp == self._stamp or not self.possible or not has_faiss():
                return self._listed
            kept = None
            try:
                head = ListsHead(self._place.head(), self._spec.digest)
                kept = head.kept(self._place, self._spec.width)
            except FileNotFoundError:
                pass
            except _UNUSABLE as problem:
                self._warn(problem)
            with self._lock:  # who follows meanwhile finds them, or they find what was followed
                self._stamp, self._listed = stamp, None
                if kept is not None:
                    self._listed = ListedPassages(kept, rows, self._table, self._catalog)
                    self._listed.give_words(selected)
                return self._listed

    def _warn(self, problem: Exception) -> None:
        _log.warning(
            "%s: %s; every passage is scored until `memstore index` has run",
            self._place.name,
            problem,
        )

    def due(self, rows: Mapping[int, Document]) -> bool:
        """Is it time to make the lists, or to make them anew?"""
        if not self.possible or not has_faiss():
            return False
        tokens = sum(row.tokens for row in [*rows.values()])
        if tokens < PAYING:
            return False
        held = tokens_covered(self._covered(), {row.name: row for row in [*rows.values()]})
        return tokens - held >= max(PAYING, _NEW * held)

    def tells_of_gone(self, rows: Mapping[int, Document]) -> bool:
        """Are there lists of documents that are not among these, or not as they are, or that nobody
        can read?
        """
        there, covered = {row.name: row for row in [*rows.values()]}, self._covered()
        gone = any(state_of(there.get(one.name)) != one.state for one in covered)
        return self._place.stamp is not None and (gone or not covered)

    def _covered(self) -> list[Covered]:
        """The documents of lists that can be read."""
        try:
            head = ListsHead(self._place.head(), self._spec.digest)
            head.parts(self._place)  # raises where they are not of this head
            return head.covered
        except _UNUSABLE:
            return []

    def build(
        self, rows: Mapping[int, Document], progress: Callable[[int, int], None] | None
    ) -> dict[str, Any]:
        """Make lists of these documents, all that are ready, and keep them; return what was made,
        nothing where that cannot be, or would not pay. rows: as they are at any time.

        Raises CorruptMemory, InvalidInput (FAISS is missing), StorageFull, ReadOnlyMemory,
        StoreUnavailable.
        """
        documents = sorted((row for row in [*rows.values()] if row.blocks), key=lambda row: row.id)
        if not self.possible or sum(row.tokens for row in documents) < PAYING:
            return {}
        made = make(self._catalog, self._table, documents, progress)
        if made is None:
            return {}
        lists, words, documents = made
        covered = [Covered(row.name, row.blocks, state_of(row)) for row in documents]
        size = self._place.write(Made(lists, words, covered, self._spec.digest))
        return {
            "passages": lists.passages,
            "landmarks": int(lists.ends[-1]),
            "lists": len(lists.sizes),
            "bytes": size,
        }
