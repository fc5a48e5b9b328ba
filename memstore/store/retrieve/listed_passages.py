"""The passages that lists beside a memory know: which documents they are of, and their scores; and
the shortlist of a large scope that a first stage proposes from them.
"""

import threading
from collections.abc import Mapping, Sequence
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
from memstore.index.block_rows import Remembered, Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.passage_files import Covered, Kept
from memstore.index.token_lists import Added
from memstore.index.word_index import RareBlocks, WordsBeside
from memstore.store.retrieve.selector_index import SelectorIndex


class Asked(NamedTuple):
    """What a question asks of passages: see MemoryStore.shortlist."""

    rows: np.ndarray  # float32 [T, width]
    weights: np.ndarray  # float32 [T], which sum to 1
    beside: WordsBeside | None = None


class ProposedScope(NamedTuple):
    """What of a large scope is scored exactly."""

    scope: list[tuple[int, int, int]]  # runs of these blocks, in the order of the whole scope
    passages: int  # of the whole scope
    spread: tuple[float, float]  # mean and standard deviation of the scores of all


class _Scope(NamedTuple):
    """A scope as lists cover it."""

    inside: np.ndarray | None  # bool [passages of the lists]; None: all
    order: np.ndarray  # int64 [documents of the lists]: where each stands in the scope
    numbers: np.ndarray  # int64 [documents of the lists]
    rest: list[tuple[int, tuple[int, int, int]]]  # runs that lists do not cover, and where
    tokens: int  # that they cover
    passages: int  # of the scope


class ListedPassages:
    """Lists, and the documents of their passages as far as they are still the same. Safe for
    several threads.
    """

    def __init__(
        self, kept: Kept, rows: Mapping[int, Document], table: RunTable, catalog: Catalog
    ) -> None:
        """rows: the memory's ready documents."""
        self.lists, self._words = kept.lists, kept.words
        self._table, self._catalog = table, catalog
        self._blocks = np.array([one.blocks for one in kept.covered], np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        self._states = [one.state for one in kept.covered]
        self._at = {one.name: at for at, one in enumerate(kept.covered)}
        # of each its number here, while it is the same; others have one that no document has
        self._numbers = self._unknown = np.arange(-len(self._states), 0) - (1 << 62)
        self._scopes = Remembered()
        self._lock = threading.Lock()
        numbers = self._unknown.copy()
        for row in [*rows.values()]:
            at = self._at.get(row.name)
            if at is not None and self._is_same(row, at):
                numbers[at] = row.id
        self._know(numbers)

    def _is_same(self, row: Document | None, at: int) -> bool:
        return (
            row is not None and row.blocks == self._blocks[at] and state_of(row) == self._states[at]
        )

    def _know(self, numbers: np.ndarray) -> None:
        order = np.argsort(numbers)
        self._numbers, self._by_number = numbers, (order, numbers[order])
        self._scopes.clear()

    @property
    def tokens(self) -> int:
        """Of the documents that are still the same."""
        return int(self.lists.lengths[np.repeat(self._numbers > 0, self._blocks)].sum())

    def give_words(self, selected: SelectorIndex) -> None:
        """Have a selector's index find the words of the documents that are still the same where
        they are kept.
        """
        if self._words is not None:
            with self._lock:
                numbers, blocks = self._numbers.tolist(), self._blocks.tolist()
            known = [(number, n, number > 0) for number, n in zip(numbers, blocks)]
            selected.take_words(known, *self._words)

    def follow(self, document: int, row: Document | None) -> None:
        """A document has another row by now, or none."""
        with self._lock:
            numbers = np.where(self._numbers == document, self._unknown, self._numbers)
            at = None if row is None else self._at.get(row.name)
            if at is not None and self._is_same(row, at):
                numbers[at] = document
            if (numbers != self._numbers).any():
                self._know(numbers)

    def find(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where documents [n] stand in the lists, and bool [n]: are they, as they are now, in
        them.
        """
        order, numbers = self._by_number
        at = np.searchsorted(numbers, documents).clip(max=len(numbers) - 1)
        return order[at], numbers[at] == documents

    def tokens_of(self, scope: Scope) -> int:
        """How many of a scope's tokens are in the lists."""
        return self._of(scope).tokens

    def _of(self, scope: Scope) -> _Scope:
        with self._lock:
            of: _Scope = self._scopes.get(scope, lambda: self._look(scope))
        return of

    def propose(
        self, asked: Asked, words: RareBlocks | None, scope: Scope, most: tuple[int, int]
    ) -> ProposedScope | None:
        """The passages of a scope that are worth an exact score, so many of the lists at least and
        at most. None where all of them are, since they are too few.

        words: the blocks of the scope that hold a rare one of `asked`. Raises what reading lists
        raises.
        """
        of, added = self._of(scope), None
        if words is not None and asked.beside is not None:
            at, known = self.find(words.documents)
            known &= words.blocks < self._blocks[at]
            mean, deviation = words.spread
            adds = asked.beside.weight * (words.scores - mean) / max(deviation, 1e-6)
            added = Added((self._starts[at] + words.blocks)[known], adds[known])
        best = self.lists.propose(asked.rows, asked.weights, most, of.inside, added)
        if best is None:
            return None
        at = np.searchsorted(self._starts, best.rows, "right") - 1
        blocks = (best.rows - self._starts[at]).tolist()
        places, documents = of.order[at].tolist(), of.numbers[at].tolist()
        runs = [
            (place, (document, block, block + 1))
            for place, document, block in zip(places, documents, blocks)
        ]
        return ProposedScope([run for _, run in sorted(runs + of.rest)], of.passages, best.spread)

    def _look(self, scope: Scope) -> _Scope:
        runs = np.array(scope, np.int64).reshape(-1, 3)
        at, known = self.find(runs[:, 0])
        whole = known & (runs[:, 1] == 0) & (runs[:, 2] == self._blocks[at])
        order = np.full(len(self._blocks), -1, np.int64)
        order[at[whole]] = np.flatnonzero(whole)
        inside = np.repeat(order >= 0, self._blocks)
        rest = [(place, scope[place]) for place in np.flatnonzero(~whole).tolist()]
        return _Scope(
            None if inside.all() else inside,
            order,
            self._numbers,
            rest,
            int(self.lists.lengths[inside].sum()),
            int((runs[:, 2] - runs[:, 1]).sum()),
        )

    def maxima(
        self,
        q: Tensor,
        documents: np.ndarray,
        at: np.ndarray,
        blocks: np.ndarray,
        selected: SelectorIndex,
    ) -> Tensor:
        """As MemoryStore.token_maxima, of single blocks [n] of documents [n] that stand there [n]
        in the lists, read from where they lie. Raises what token_maxima raises.
        """
        begin, rows = self._starts[at], self._starts[at] + blocks
        lengths, ends, each = self.lists.lengths, self.lists.ends, RUN_BLOCKS["token"]
        first = begin + blocks // each * each
        last = np.minimum(first + each, begin + self._blocks[at]) - 1
        places = TokenPlaces(
            documents,
            blocks,
            lengths[rows],
            self.lists.digests[rows],
            ends[last] - ends[rows] + lengths[rows],
            last - first + 1,
            ends[last] - ends[first] + lengths[first],
        )
        with self._catalog.database.read() as txn:
            landmarks = self._table.token_landmarks(txn, places)
            if landmarks is None:
                self._check_same(txn, documents, at)
                raise CorruptMemory(
                    f"{self._catalog.database.path}: token landmarks are missing or damaged; run "
                    "verify"
                )
        found = TokenIndex(landmarks.shape[1])
        found.add(1, 0, torch.from_numpy(landmarks), places.lengths)
        return found.maxima(q, [(1, 0, len(rows))])

    def _check_same(self, txn: Transaction, documents: np.ndarray, at: np.ndarray) -> None:
        """Raises DocumentNotFound for one that is gone, or another by now. at: where they stand."""
        for number, place in {*zip(documents.tolist(), at.tolist())}:
            if state_of(self._catalog.row(txn, number)) != self._states[place]:
                raise DocumentNotFound(
                    f"document {number} was forgotten or changed; look at the memory's documents "
                    "again"
                )


def state_of(row: Document | None) -> bytes:
    """Tells a document's text from any other's that it had or will have."""
    if row is None:
        return b""
    return xxhash.xxh3_64_digest(row.write)


def tokens_covered(covered: Sequence[Covered], rows: Mapping[str, Document]) -> int:
    """The tokens of those documents, by name, that are in lists as they are."""
    return sum(
        rows[one.name].tokens for one in covered if state_of(rows.get(one.name)) == one.state
    )


class Shortlist:
    """Some blocks of a scope, and what a selector asks of a memory to score them.

    scope: runs of these blocks, in the order of the whole scope. blocks: of the whole scope.
    spread: mean and standard deviation of the scores of all of these, of the question that the
    shortlist was made for, as a sample tells them.
    """

    def __init__(
        self,
        selected: SelectorIndex,
        listed: ListedPassages,
        proposed: ProposedScope,
        whole: Scope,
        words: tuple[Mapping[int, float], tuple[float, float]] | None,
    ) -> None:
        """Use MemoryStore.shortlist. words: such as were asked for, and their word_spread."""
        self.scope: Scope = proposed.scope
        self.blocks, self.spread = proposed.passages, proposed.spread
        self._selected, self._listed, self._whole = selected, listed, whole
        self._words = words

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """As MemoryStore.token_maxima, for blocks of the shortlist."""
        runs = np.array(scope, np.int64).reshape(-1, 3)
        sizes = runs[:, 2] - runs[:, 1]
        at, known = self._listed.find(runs[:, 0])
        in_lists = np.repeat(known, sizes)
        out = torch.empty(len(q), len(in_lists))
        if known.any():
            first = np.repeat(runs[:, 1] - np.cumsum(sizes) + sizes, sizes)
            documents, blocks = np.repeat(runs[:, 0], sizes), first + np.arange(len(in_lists))
            places = np.repeat(at, sizes)[in_lists]
            found = self._listed.maxima(
                q, documents[in_lists], places, blocks[in_lists], self._selected
            )
            out[:, torch.from_numpy(in_lists)] = found
        if not known.all():
            rest = [scope[number] for number in np.flatnonzero(~known).tolist()]
            out[:, torch.from_numpy(~in_lists)] = self._selected.maxima(q, rest)
        return out

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """As MemoryStore.word_scores, with rarity and lengths counted in the whole scope."""
        return self._selected.scores(words, scope, self._whole)

    def word_spread(self, words: Mapping[int, float]) -> tuple[float, float]:
        """Mean and standard deviation of word_scores over all blocks of the whole scope."""
        if self._words is not None and self._words[0] == words:
            return self._words[1]
        return self._selected.rare(words, self._whole).spread
