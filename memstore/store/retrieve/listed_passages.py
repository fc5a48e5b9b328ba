"""The passages that lists beside a memory know: which documents they are of, and their scores."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable, TokenPlaces
from memstore.errors import CorruptMemory, DocumentNotFound
from memstore.index.block_rows import Remembered
from memstore.index.index_file import Unusable
from memstore.index.late_interaction import TokenIndex
from memstore.index.passage_files import PassageFiles
from memstore.index.scope import Scope
from memstore.index.word_postings import MappedPostings
from memstore.store.retrieve.selector_index import SelectorIndex


class ProposedScope(NamedTuple):
    """What of a large scope is scored exactly."""

    scope: list[tuple[int, int, int]]  # runs of these blocks, in the order of the whole scope
    passages: int  # of the whole scope
    spread: tuple[float, float]  # mean and standard deviation of the scores of all


class _Scope(NamedTuple):
    """A scope as lists cover it."""

    inside: np.ndarray | None  # bool [passages of the lists]; None: all
    order: np.ndarray  # int64 [documents of the lists]: where each stands in the scope
    rest: list[tuple[int, tuple[int, int, int]]]  # runs that lists do not cover, and where
    tokens: int  # that they cover
    passages: int  # of the scope


class ListedPassages:
    """Lists, and the documents of their passages as far as they are still the same. Safe for
    several threads.
    """

    def __init__(
        self, found: PassageFiles, rows: Mapping[int, Document], table: RunTable, catalog: Catalog
    ) -> None:
        """rows: the memory's ready documents. Raises Unusable."""
        self.lists, self._words = found.lists, found.words
        covered = found.covered
        self._table, self._catalog = table, catalog
        self._documents = np.array([one.document for one in covered], np.int64)
        if (np.diff(self._documents) <= 0).any():
            raise Unusable("the documents of passages.idx are not in order")
        self._blocks = np.array([one.blocks for one in covered], np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        self._states = [one.state for one in covered]
        self._there = np.array([state_of(rows.get(one.document)) == one.state for one in covered])
        self._scopes = Remembered()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Of the documents that are still the same."""
        return int(self.lists.lengths[np.repeat(self._there, self._blocks)].sum())

    def give_words(self, selected: SelectorIndex) -> None:
        """Have a selector's index begin with the words of the documents that are still the same."""
        if self._words is not None and isinstance(self._words.postings, MappedPostings):
            with self._lock:
                known = zip(self._documents.tolist(), self._blocks.tolist(), self._there.tolist())
            selected.take_words([*known], self._words.lengths, self._words.postings)

    def follow(self, document: int, row: Document | None) -> None:
        """A document has another row by now, or none."""
        with self._lock:
            at = int(np.searchsorted(self._documents, document))
            if at < len(self._documents) and self._documents[at] == document:
                self._there[at] = state_of(row) == self._states[at]
                self._scopes.clear()

    def propose(
        self, q: np.ndarray, weights: np.ndarray, scope: Scope, most: int, least_tokens: int
    ) -> ProposedScope | None:
        """The passages of a scope that are worth an exact score, `most` of the lists. None where
        all of them are: of less than so many tokens, or of too few passages.

        q: float32 [T, width]; weights: float32 [T], which sum to 1.
        """
        with self._lock:
            of: _Scope = self._scopes.get(scope, lambda: self._look(scope))
        if of.tokens < least_tokens:
            return None
        best = self.lists.propose(q, weights, most, of.inside)
        if best is None:
            return None
        at = np.searchsorted(self._starts, best.rows, "right") - 1
        blocks = (best.rows - self._starts[at]).tolist()
        places, documents = of.order[at].tolist(), self._documents[at].tolist()
        runs = [
            (place, (document, block, block + 1))
            for place, document, block in zip(places, documents, blocks)
        ]
        return ProposedScope([run for _, run in sorted(runs + of.rest)], of.passages, best.spread)

    def _look(self, scope: Scope) -> _Scope:
        runs = np.array(scope, np.int64).reshape(-1, 3)
        at = np.searchsorted(self._documents, runs[:, 0]).clip(max=len(self._documents) - 1)
        whole = (
            (self._documents[at] == runs[:, 0])
            & (runs[:, 1] == 0)
            & (runs[:, 2] == self._blocks[at])
            & self._there[at]
        )
        held = at[whole]
        order = np.full(len(self._documents), -1, np.int64)
        order[held] = np.flatnonzero(whole)
        inside = np.repeat(order >= 0, self._blocks)
        rest = [(place, scope[place]) for place in np.flatnonzero(~whole).tolist()]
        return _Scope(
            None if inside.all() else inside,
            order,
            rest,
            int(self.lists.lengths[inside].sum()),
            int((runs[:, 2] - runs[:, 1]).sum()),
        )

    def covers(self, documents: np.ndarray) -> np.ndarray:
        """bool [n]: which of these documents are in the lists, and as they were then."""
        at = np.searchsorted(self._documents, documents).clip(max=len(self._documents) - 1)
        known: np.ndarray = (self._documents[at] == documents) & self._there[at]
        return known

    def maxima(
        self, q: Tensor, documents: np.ndarray, blocks: np.ndarray, selected: SelectorIndex
    ) -> Tensor:
        """As MemoryStore.token_maxima, of single blocks [n] of covered documents [n]: read from
        where they lie, without their checksums. Raises what token_maxima raises.
        """
        at = np.searchsorted(self._documents, documents)
        begin, rows = self._starts[at], self._starts[at] + blocks
        lengths, ends, each = self.lists.lengths, self.lists.ends, RUN_BLOCKS["token"]
        first = begin + blocks // each * each
        last = np.minimum(first + each, begin + self._blocks[at]) - 1
        places = TokenPlaces(
            documents,
            blocks,
            lengths[rows],
            ends[last] - ends[rows] + lengths[rows],
            last - first + 1,
            ends[last] - ends[first] + lengths[first],
        )
        with self._catalog.database.read() as txn:
            landmarks = self._table.token_views(txn, places)
            if landmarks is None:
                selected.follow(txn)
                selected.check_current()
                self._check_same(txn, documents)
                raise CorruptMemory(
                    f"{self._catalog.database.path}: token landmarks are missing; run verify"
                )
        found = TokenIndex(1, landmarks.shape[2], torch.int8)
        found.add(1, 0, torch.from_numpy(landmarks), places.lengths)
        return found.maxima(q, 0, [(1, 0, len(rows))])

    def _check_same(self, txn: Transaction, documents: np.ndarray) -> None:
        """Raises DocumentNotFound for one that is gone, or another by now."""
        for number in np.unique(documents).tolist():
            state = self._states[int(np.searchsorted(self._documents, number))]
            if state_of(self._catalog.row(txn, number)) != state:
                raise DocumentNotFound(
                    f"document {number} was forgotten or changed; look at the memory's documents "
                    "again"
                )


def state_of(row: Document | None) -> bytes:
    """Tells a document's text from any other's that it had or will have."""
    if row is None:
        return b""
    told = f"{row.id} {row.blocks} {row.tokens} {row.source_hash} {row.writes}"
    return xxhash.xxh3_64_digest(told.encode())
