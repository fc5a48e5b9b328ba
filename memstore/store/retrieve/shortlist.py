"""What of a large scope is scored exactly: the passages that a first stage proposes, and all that
it does not know. To a selector it is what a memory is.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from memstore.index.scope import Scope
from memstore.store.retrieve.listed_passages import ListedPassages, ProposedScope
from memstore.store.retrieve.selector_index import SelectorIndex


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

    def token_maxima(self, q: Tensor, head: int, scope: Scope) -> Tensor:
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
            out[:, torch.from_numpy(~in_lists)] = self._selected.maxima(q, head, rest)
        return out

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """As MemoryStore.word_scores, with rarity and lengths counted in the whole scope."""
        return self._selected.scores(words, scope, self._whole)

    def word_spread(self, words: Mapping[int, float]) -> tuple[float, float]:
        """Mean and standard deviation of word_scores over all blocks of the whole scope."""
        if self._words is not None and self._words[0] == words:
            return self._words[1]
        return self._selected.rare(words, self._whole).spread
