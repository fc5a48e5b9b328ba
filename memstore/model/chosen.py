"""Which tokens of which blocks a question reads: the blocks that its scores mean, and a margin
around what they were found by.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.base import Scope
from memstore.model.selectors import GATE_TOGETHER, Found, Selector, covered, in_range
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped

_PART = 0.05  # of a question, which has weight 1, that a block has to add to what better ones cover


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

    @property
    def together(self) -> float | None:
        """What the best GATE_TOGETHER of them cover of the question; None where the selector does
        not know by what they were found.
        """
        if self._matches is None or not len(self._best):
            return None
        return float(covered(self._matches.adds[:GATE_TOGETHER])[-1])

    def meant(self, settings: LookupSettings, block_size: int) -> list[Chosen]:
        """Those that are meant, in the order of the text: that score nearly as high as the best
        (settings.score_range), and that say a part of the question which no better one says.

        settings.margin tokens are read around those by which a block was found, also where they
        lie in a neighbour of its document, and around the whole block where the selector does not
        know by which.
        """
        means = in_range(self.scores[self._best], self.scores, settings.score_range)
        places = torch.tensor([[0, block_size - 1]]).expand(len(self._best), 2)
        if self._matches is not None:
            places = self._matches.places
            before = torch.zeros(1)
            means |= covered(self._matches.adds).diff(prepend=before) >= _PART
        found = dict(zip(self._best[means].tolist(), places[means].tolist()))
        tokens: dict[int, tuple[int, int]] = {}
        for candidate, first, end in _margins(found, self._scope, settings.margin, block_size):
            begun, ended = tokens.get(candidate, (first, end))
            tokens[candidate] = min(begun, first), max(ended, end)
        tokens |= dict.fromkeys(found, (0, block_size))
        return [
            Chosen(*_place(self._scope, candidate)[:2], float(self.scores[candidate]), first, end)
            for candidate, (first, end) in sorted(tokens.items())
        ]


def _margins(
    found: Mapping[int, tuple[int, int]], scope: Scope, margin: int, size: int
) -> Iterator[tuple[int, int, int]]:
    """Candidates beside those found, and the tokens [first, end) to read of each. found: by
    candidate, the first and last token by which it was.
    """
    for candidate, (begun, ended) in found.items():
        run = _place(scope, candidate)[2]
        before, behind = margin - begun, ended + margin + 1 - size
        if candidate - 1 in run and before > 0:
            yield candidate - 1, size - before, size
        if candidate + 1 in run and behind > 0:
            yield candidate + 1, 0, behind


def _place(scope: Scope, candidate: int) -> tuple[int, int, range]:
    """Document and block of a candidate, and the candidates of its run of the scope."""
    end = 0
    for document, begin, stop in scope:
        first, end = end, end + stop - begin
        if candidate < end:
            return document, begin + candidate - first, range(first, end)
    raise IndexError(candidate)
