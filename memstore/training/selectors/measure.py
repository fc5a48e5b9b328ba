"""How well a selector finds: the rank of the passage that answers among those of many windows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec
from memstore.index.block_rows import Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.word_index import WordIndex
from memstore.model.lookup_settings import CAUTION, CAUTIONS
from memstore.model.passages.passage_choice import Candidates
from memstore.model.passages.selector import (
    GATE_BLOCKS,
    GATE_TOGETHER,
    Captured,
    Gate,
    Selector,
    confidence,
)
from memstore.model.tokenizer import TokenText
from memstore.training.selectors.states import States

KS = (1, 4, 8, 16)
_HALVINGS = 3  # of a haystack, to see how its best score rises


class Haystack:
    """Passages of many windows, as a memory would hold them for a selector, but in memory alone."""

    def __init__(self, form: IndexSpec) -> None:
        self._tokens = TokenIndex(form.width) if form.width else None
        self._words = WordIndex() if form.words else None
        self.scope: list[tuple[int, int, int]] = []

    @property
    def passages(self) -> int:
        """How many it holds."""
        return sum(end - first for _, first, end in self.scope)

    def add_passages(
        self, selector: Selector, tokenizer: TokenText, passages: Sequence[Captured]
    ) -> None:
        """One more document, of these passages, with what the selector stores of them."""
        number = len(self.scope)
        kept = [found for one in passages if (found := selector.landmarks(one)) is not None]
        if self._tokens is not None and kept:
            self._tokens.add(number, 0, torch.cat(kept), [len(one.ids) for one in passages])
        words = selector.words([tokenizer.decode(one.ids) for one in passages])
        if self._words is not None and words is not None:
            self._words.add(number, 0, BlockWords.of(words))
        self.scope.append((number, 0, len(passages)))

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        assert self._tokens is not None
        return self._tokens.maxima(q, scope)

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        assert self._words is not None
        return self._words.scores(words, scope)


@dataclass(frozen=True)
class Outcome:
    """Of one question: how many passages scored higher than the right one, -1 where none is right;
    the best score of all, and how much the best of all that do not answer is above the best of half
    of them; and what the best ones cover together of a question of several parts.
    """

    kind: str
    rank: int
    confidence: float
    growth: float
    together: float | None = None


def measure(
    selector: Selector, haystack: Haystack, states: States, scored: Sequence[Tensor]
) -> list[Outcome]:
    """Ask every question of `states` of the whole haystack, which begins with their passages.
    scored: the selector's scores of each question.
    """
    found = []
    for asked, scores in zip(states.asked, scored, strict=True):
        query = states.query(asked)
        adds = partial(selector.adds, query, haystack)
        best = Candidates(scores, haystack.scope, GATE_TOGETHER, adds, lambda *place: place)
        right = sorted(asked.touched)
        skipped = torch.zeros(len(scores), dtype=torch.bool)
        skipped[right + sorted(asked.others)] = True
        rest = scores[~skipped]
        rank = int((rest > scores[right].max()).sum()) if right else -1
        whole = torch.cat([scores[right], rest])
        growth = _growth(rest)
        found.append(Outcome(asked.kind, rank, confidence(whole), growth, best.together))
    return found


def recalls(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """By kind, the share of questions whose right passage was among the best k, for each of KS."""
    ranks = defaultdict(list)
    for outcome in outcomes:
        if outcome.rank >= 0:
            ranks[outcome.kind].append(outcome.rank)
    return {
        kind: [sum(rank < k for rank in found) / len(found) for k in KS]
        for kind, found in ranks.items()
    }


def gate_of(
    answered: Sequence[Outcome], unanswered: Sequence[Outcome], passages: int, let: float = 0.03
) -> Gate | None:
    """A gate that refuses each share of CAUTIONS of the questions that have an answer among so many
    passages; and that, with the default caution, lets at most a share `let` of those that have none
    pass for what the best passages cover together. None without a question that has an answer.

    It rises half as fast with the number of passages as the best of those that do not answer: what
    does answer scores no higher among more, so that the errors of both kinds share the rise.
    """
    best = sorted(outcome.confidence for outcome in answered)
    if not best:
        return None
    growth = sum(outcome.growth for outcome in answered) / len(answered) / 2
    at_512 = growth * math.log2(max(1, passages) / GATE_BLOCKS)
    steps = [best[int(share * len(best))] for share in CAUTIONS]
    least, more = steps[CAUTIONS.index(CAUTION)], None
    held = sorted(
        outcome.together
        for outcome in unanswered
        if outcome.together is not None and outcome.confidence < least
    )
    if held:
        highest = held[-1 - min(int(let * len(unanswered)), len(held) - 1)]
        more = math.nextafter(highest, math.inf) - least
    a, b, c, d, e = (step - at_512 for step in steps)
    return Gate((a, b, c, d, e), growth, more)


def _growth(scores: Tensor) -> float:
    """How much the best of scores [blocks] rises as their number doubles."""
    parts = [part.max() for part in scores.tensor_split(2**_HALVINGS) if len(part)]
    if len(parts) < 2**_HALVINGS:
        return 0.0
    return float(scores.max() - torch.stack(parts).mean()) / _HALVINGS
