"""The passages of a memory's lists: which documents they are of, and the shortlist of a large scope
that the lists propose.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable, TokenPlaces
from memstore.errors import CorruptMemory, DocumentNotFound
from memstore.index.block_rows import Remembered, Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.passage_files import Covered, PassageLists
from memstore.index.word_index import WordsBeside
from memstore.store.retrieve.selector_index import SelectorIndex


class _Scope(NamedTuple):
    """A scope as lists cover it."""

    at: dict[int, int]  # where documents are in the lists, by number
    inside: np.ndarray | None  # bool [passages of the lists]; None: all
    order: np.ndarray  # int64 [documents of the lists]: where each is in the scope
    rest: list[tuple[int, tuple[int, int, int]]]  # runs that lists do not cover, and where
    tokens: int  # that lists cover

    def find(self, documents: np.ndarray) -> np.ndarray:
        """Where documents [n] are in the lists, int64 [n]; -1: nowhere."""
        return np.array([self.at.get(number, -1) for number in documents.tolist()], np.int64)


class ListedPassages:
    """Lists, and the documents of their passages that are unchanged. Safe for several threads."""

    def __init__(self, made: PassageLists, table: RunTable, catalog: Catalog) -> None:
        self.lists, self._words = made.lists, made.words
        self._table, self._catalog = table, catalog
        self._blocks = np.array([one.blocks for one in made.covered], np.int64)
        self.starts = np.cumsum(self._blocks) - self._blocks
        self._places = {(one.name, one.state): at for at, one in enumerate(made.covered)}
        self._scopes = Remembered()  # no number is used again for another document
        self._lock = threading.Lock()

    def _place(self, row: Document | None) -> int | None:
        """Where a document is in the lists; None if it is not, or has changed."""
        return None if row is None else self._places.get((row.name, state_of(row)))

    def give_words(self, selected: SelectorIndex, rows: Iterable[Document]) -> None:
        """Have a selector's index take the words of unchanged documents from the lists."""
        if self._words is not None:
            numbers = {self._place(row): row.id for row in rows}
            sizes = enumerate(self._blocks.tolist())
            known = [(numbers.get(at, 0), blocks, at in numbers) for at, blocks in sizes]
            selected.take_words(known, *self._words)

    def within(self, scope: Scope, rows: Mapping[int, Document]) -> _Scope:
        """A scope as these lists cover it."""
        with self._lock:
            found: _Scope = self._scopes.get(scope, lambda: self._look(scope, rows))
        return found

    def _look(self, scope: Scope, rows: Mapping[int, Document]) -> _Scope:
        order, at, rest = np.full(len(self._blocks), -1), dict[int, int](), []
        for number, run in enumerate(scope):
            place = self._place(rows.get(run[0]))
            if place is not None and run[1:] == (0, self._blocks[place]):
                order[place], at[run[0]] = number, place
            else:
                rest.append((number, run))
        inside = np.repeat(order >= 0, self._blocks)
        tokens = int(self.lists.lengths[inside].sum())
        return _Scope(at, None if inside.all() else inside, order, rest, tokens)

    def propose(
        self,
        question: tuple[Tensor, Tensor, WordsBeside | None],
        selected: SelectorIndex,
        scope: Scope,
        within: _Scope,
        most: tuple[int, int],
    ) -> "Shortlist | None":
        """The passages of a scope that are worth an exact score: so many of the lists at least and
        at most. None where all of them are, since they are too few. question: q, weights, beside of
        Retrieval.shortlist. Raises what a search of words raises.
        """
        (q, weights, beside), added, words = question, None, None
        if beside is not None:
            rare = selected.rare(beside.words, scope)
            words, (mean, deviation) = (beside.words, rare.spread), rare.spread
            at = within.find(rare.documents)
            adds = beside.weight * (rare.scores - mean) / max(deviation, 1e-6)
            added = (self.starts[at] + rare.blocks)[at >= 0], adds[at >= 0]
        best = self.lists.propose(q.numpy(), weights.numpy(), most, within.inside, added)
        if best is None:
            return None
        rows, spread = best
        at = np.searchsorted(self.starts, rows, "right") - 1
        places, blocks = within.order[at].tolist(), (rows - self.starts[at]).tolist()
        runs = [
            (place, (scope[place][0], block, block + 1)) for place, block in zip(places, blocks)
        ]
        found = [run for _, run in sorted(runs + within.rest)]
        return Shortlist(selected, self, found, spread, (scope, within), words)

    def landmarks(self, documents: np.ndarray, at: np.ndarray, blocks: np.ndarray) -> TokenIndex:
        """The landmarks of single blocks [n] of documents [n] that are at these places [n] of the
        lists, as those of document 1; no others are read. Raises what token_maxima raises.
        """
        begin, rows = self.starts[at], self.starts[at] + blocks
        lengths, ends, each = self.lists.lengths, self.lists.ends, RUN_BLOCKS["token"]
        first = begin + blocks // each * each
        last = np.minimum(first + each, begin + self._blocks[at]) - 1
        behind, of_run = ends[last] - ends[rows], ends[last] - ends[first]
        places = TokenPlaces(
            documents, blocks, lengths[rows], self.lists.digests[rows], behind + lengths[rows],
            last - first + 1, of_run + lengths[first],
        )  # fmt: skip
        with self._catalog.database.read() as txn:
            landmarks = self._table.token_landmarks(txn, places)
            if landmarks is None:
                for number, place in {*zip(documents.tolist(), at.tolist())}:
                    if self._place(self._catalog.row(txn, number)) != place:
                        raise DocumentNotFound(
                            f"document {number} was forgotten or changed; look at the memory's "
                            "documents again"
                        )
                where = self._catalog.database.path
                raise CorruptMemory(f"{where}: token landmarks are missing or damaged; run verify")
        found = TokenIndex(landmarks.shape[1])
        found.add(1, 0, torch.from_numpy(landmarks), places.lengths)
        return found


def state_of(row: Document | None) -> bytes:
    """Tells a document's text from any other's that it had or will have."""
    return b"" if row is None else xxhash.xxh3_64_digest(row.write)


def tokens_covered(covered: Iterable[Covered], rows: Mapping[str, Document]) -> int:
    """The tokens of those documents, by name, that are unchanged in lists."""
    return sum(
        rows[one.name].tokens for one in covered if state_of(rows.get(one.name)) == one.state
    )


class Shortlist:
    """Some blocks of a scope, and what a selector asks of a memory to score them.

    scope: runs of these blocks, in the order of the whole scope. blocks: how many the whole scope
    has. spread: mean and standard deviation of the scores of all of these, of the question that the
    shortlist was made for, by a sample.
    """

    def __init__(
        self,
        selected: SelectorIndex,
        listed: ListedPassages,
        scope: Scope,
        spread: tuple[float, float],
        whole: tuple[Scope, _Scope],
        words: tuple[Mapping[int, float], tuple[float, float]] | None,
    ) -> None:
        """Use Retrieval.shortlist. words: the question's, and their word_spread."""
        self.scope, self.spread = scope, spread
        self.blocks = sum(end - first for _, first, end in whole[0])
        self._selected, self._listed, self._words = selected, listed, words
        self._whole, self._within = whole

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """As SelectorIndex.token_maxima, for blocks of the shortlist."""
        runs = np.array(scope, np.int64).reshape(-1, 3)
        sizes = runs[:, 2] - runs[:, 1]
        at = self._within.find(runs[:, 0])
        known = np.repeat(at >= 0, sizes)
        out = torch.empty(len(q), len(known))
        if known.any():
            block = np.arange(len(known)) + np.repeat(runs[:, 1] - np.cumsum(sizes) + sizes, sizes)
            columns = np.repeat(runs[:, 0], sizes), np.repeat(at, sizes), block
            found = self._listed.landmarks(*(column[known] for column in columns))
            out[:, torch.from_numpy(known)] = found.maxima(q, [(1, 0, int(known.sum()))])
        if not known.all():
            rest = [scope[number] for number in np.flatnonzero(at < 0).tolist()]
            out[:, torch.from_numpy(~known)] = self._selected.token_maxima(q, rest)
        return out

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """As SelectorIndex.word_scores, with rarity and lengths counted in the whole scope."""
        return self._selected.word_scores(words, scope, self._whole)

    def word_spread(self, words: Mapping[int, float]) -> tuple[float, float]:
        """Mean and standard deviation of word_scores over all blocks of the whole scope."""
        if self._words is not None and self._words[0] == words:
            return self._words[1]
        return self._selected.rare(words, self._whole).spread
