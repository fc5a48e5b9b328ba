"""Which tokens of which blocks a question reads: the blocks that its scores mean, a margin beside
those near whose end it was found, and the rest of a sentence that goes on in the next one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.base import Scope
from memstore.model.selectors import GATE_TOGETHER, Found, Selector, covered, in_range
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped

_NEAR = 16  # tokens from a block's end: what is found there may go on beyond it
_SENTENCE = 48  # tokens of a sentence that are read in the next block at most
_PART = 0.04  # of a question, which has weight 1, that a block has to add to what better ones cover


Texts = Callable[[int, int, int], Sequence[str]]
"""The text of each of the tokens first .. end - 1 of a document, fewer where it ends; none where
that is not known.
"""


class Chosen(NamedTuple):
    """A block that is read."""

    document: int
    block: int
    score: float
    first: int = 0  # of its tokens, those from here
    end: int | None = None  # up to here are read; None = all


class Candidates:
    """The best blocks of a question, and by what each was found."""

    def __init__(
        self, scores: Tensor, selector: Selector, tapped: Tapped, store: Found, scope: Scope, k: int
    ) -> None:
        """scores: [blocks of the scope]; tapped: what was asked with; k: how many at most."""
        self.scores, self._scope = scores, scope
        self._best = scores.topk(min(k, len(scores))).indices
        blocks = [_place(scope, number)[:2] for number in self._best.tolist()]
        runs = [(document, block, block + 1) for document, block in blocks]
        self._matches = selector.matches(tapped, store, runs)

    def best(self, most: int) -> list[Chosen]:
        """Whole blocks, best first, at most so many, whether or not they are read."""
        ranked = self.scores.topk(min(most, len(self.scores)))
        return [
            Chosen(*_place(self._scope, candidate)[:2], score)
            for candidate, score in zip(ranked.indices.tolist(), ranked.values.tolist())
        ]

    @property
    def together(self) -> float | None:
        """What the best GATE_TOGETHER of them cover of a question of so many parts; None where not
        all of them say a part of their own, or where it is not known by what they were found.
        """
        adds = self._adds()[:GATE_TOGETHER]
        several = len(adds) == GATE_TOGETHER and bool((adds >= _PART).all())
        return float(adds.sum()) if several else None

    def _adds(self) -> Tensor:
        """[n], best first: what each covers of the question beyond those before it; nothing where
        that is not known.
        """
        if self._matches is None:
            return torch.zeros(len(self._best))
        return covered(self._matches.adds).diff(prepend=torch.zeros(1))

    def meant(
        self, settings: LookupSettings, block_size: int, texts: Texts, *, parts: bool
    ) -> list[Chosen]:
        """Those that are meant, in the order of the text: that score nearly as high as the best
        (settings.score_range), and of a question of several `parts` those that say a part of it
        which no better one says.

        A margin of settings.margin tokens is read of a block's neighbour in its document where it
        was found near that end, and on both sides where the selector does not know by which tokens;
        and what is missing of the sentence by which it was found.
        """
        means = in_range(self.scores[self._best], self.scores, settings.score_range)
        if parts:
            means |= self._adds() >= _PART
        if self._matches is None:
            places = [(0, block_size - 1)] * int(means.sum())
        else:
            places = self._matches.places[means].tolist()
        found = dict(zip(self._best[means].tolist(), places))
        if settings.margin == 0:
            found = {}
        tokens: dict[int, tuple[int, int]] = {}
        for candidate, first, end in self._beside(found, settings.margin, block_size, texts):
            begun, ended = tokens.get(candidate, (first, end))
            tokens[candidate] = min(begun, first), max(ended, end)
        tokens |= dict.fromkeys(self._best[means].tolist(), (0, block_size))
        return [
            Chosen(*_place(self._scope, candidate)[:2], float(self.scores[candidate]), first, end)
            for candidate, (first, end) in sorted(tokens.items())
        ]

    def _beside(
        self, found: Mapping[int, tuple[int, int]], margin: int, size: int, texts: Texts
    ) -> Iterator[tuple[int, int, int]]:
        """Candidates beside those found, and the tokens [first, end) to read of each. found: by
        candidate, the first and last token by which it was.
        """
        margin = min(margin, size)
        for candidate, (begun, ended) in found.items():
            document, block, run = _place(self._scope, candidate)
            if candidate - 1 in run and begun < _NEAR:
                yield candidate - 1, size - margin, size
            if candidate + 1 in run:
                behind = margin if ended >= size - _NEAR else 0
                if self._matches is not None:
                    first = block * size + ended
                    last = texts(document, first, (block + 1) * size + _SENTENCE)
                    behind = max(behind, rest_of_sentence(last) + ended - size)
                if behind > 0:
                    yield candidate + 1, 0, behind


def rest_of_sentence(texts: Sequence[str]) -> int:
    """How many of some tokens, by the text of each, belong to the sentence of the first; 0 where
    none of them ends it.
    """
    for number, (text, following) in enumerate(pairwise([*texts, ""]), 1):
        closed = text.rstrip("\"'\u2019\u201d)*_")
        ends = closed.endswith((".", "!", "?")) and not following[:1].isalnum()
        if ends or "\n" in text:
            return number
    return 0


def _place(scope: Scope, candidate: int) -> tuple[int, int, range]:
    """Document and block of a candidate, and the candidates of its run of the scope."""
    end = 0
    for document, begin, stop in scope:
        first, end = end, end + stop - begin
        if candidate < end:
            return document, begin + candidate - first, range(first, end)
    raise IndexError(candidate)
