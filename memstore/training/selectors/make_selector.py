"""Make a selector for a model: a learned projection combined with words, trained on questions and
measured with held-out ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.disk.tables.runs import BlockWords
from memstore.errors import InvalidInput
from memstore.index.block_rows import Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.word_index import WordIndex, around
from memstore.model.lookup_settings import CAUTIONS
from memstore.model.passages.adaptation import TAUGHT, UNADAPTED, Adaptation
from memstore.model.passages.selector import (
    GATE_BLOCKS,
    Captured,
    Gate,
    Learned,
    Selector,
    confidence,
)
from memstore.model.tokenizer import TokenText
from memstore.training.reading_questions import TOO_FEW, AskedContext, split_titles
from memstore.training.selectors.learn import LearnConfig, learn, untrained
from memstore.training.selectors.states import States, best_wrong, read_states

if TYPE_CHECKING:
    from memstore.hf.passage_adapter import HuggingFacePassageModel

KS = (1, 4, 8)  # best passages; the score is how often the right one is among the last
_HALVINGS = 3  # of a haystack, to see how its best score rises
_WORD_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
_TEXTS, _HELD_OUT = 1920, 384  # that are read at most, for training and to measure with
_HAY = 1024  # passages of training that held-out questions are asked of, too
_BY_WORDS, _BY_STATES = 6, 8  # hard negatives of each round


def adapt(
    reader: HuggingFacePassageModel,
    contexts: Sequence[AskedContext],
    *,
    begin: Learned | None = None,
    config: LearnConfig | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Adaptation:
    """Make a selector for a model from questions, and measure it with held-out ones.

    begin: what training begins with; None: random weights. report: called with lines of progress.
    Raises InvalidInput for questions of fewer than two titles, and if too few answers are in a
    passage verbatim.
    """
    config = config or LearnConfig()
    made_for, tokenizer = reader.made_for, reader.tokenizer
    # whose states are projected: below the middle
    layer = max(1, made_for.num_layers // 2 - 1) if begin is None else begin.layer

    def read(some: Sequence[AskedContext], most: int) -> States:
        chosen = drawn(some, most, config.seed)
        found = read_states(chosen, reader, layer, seed=config.seed, report=report)
        if not found.asked:
            raise InvalidInput(TOO_FEW)
        return found

    train, test = split_titles(contexts, config.seed)
    held_out, states = read(test, _HELD_OUT), read(train, _TEXTS)
    by_words = _alike(states, tokenizer)
    start = untrained(states, made_for.vocabulary, config) if begin is None else begin.projection
    first = learn(states, start, config, by_words, reader.device, report)
    report("learning again, with passages that were wrongly found")
    by_states = first.wrong(states, _BY_STATES)
    hard = {at: [*some, *by_states[at]] for at, some in by_words.items()}
    second = learn(states, start, config, hard, reader.device, report)
    learned = second.selector(layer)
    haystack = Haystack(Selector(learned, word_weight=1.0), tokenizer)
    for some, most in ((held_out, len(held_out.ends)), (states, _HAY)):
        haystack.add_passages([some.shown(at) for at in range(min(most, len(some.ends)))])
    selector, outcomes = _with_words(learned, haystack, held_out)
    return replace(
        TAUGHT if reader.adapted_passages else UNADAPTED,
        selector=selector,
        gate=gate_of(outcomes, sum(passages for _, _, passages in haystack.scope)),
        passage_tokens=reader.passage_tokens,
        weights=made_for.weights,
        scores={"asked": _recalls(outcomes)[-1]},
    )


def drawn(contexts: Sequence[AskedContext], count: int, seed: int) -> list[AskedContext]:
    """Draw about `count` contexts with answers; a collection's share grows with the square root of
    its size.
    """
    collections: dict[str, list[AskedContext]] = defaultdict(list)
    for one in contexts:
        if any(asked.answers for asked in one.questions):
            collections[one.collection].append(one)
    roots = {name: len(some) ** 0.5 for name, some in collections.items()}
    rng, all_roots = Random(seed), sum(roots.values())
    return [
        one
        for name, some in sorted(collections.items())
        for one in rng.sample(some, min(len(some), math.ceil(count * roots[name] / all_roots)))
    ]


def _alike(states: States, tokenizer: TokenText) -> dict[int, list[int]]:
    """For each question, by Asked.first: passages of the same collection that share most rare words
    with it and do not answer it.
    """
    selector, found = Selector(), dict[int, list[int]]()
    for passages, asked in states.collections():
        haystack = Haystack(selector, tokenizer)
        haystack.add_passages([states.shown(at) for at in passages])
        for one in asked:
            scores = selector.scores(states.query(one), haystack, haystack.scope)
            found[one.first] = best_wrong(scores, one, passages.start, _BY_WORDS)
    return found


def _with_words(
    learned: Learned, haystack: Haystack, states: States
) -> tuple[Selector, list[Outcome]]:
    """The selector with the best weight for words, and its outcomes."""
    alone, scope = Selector(learned), haystack.scope
    queries = [states.query(one) for one in states.asked]
    by_landmarks = [alone.scores(query, haystack, scope) for query in queries]
    by_words = [haystack.word_scores(query.words, scope) for query in queries]
    tried = {}
    for weight in _WORD_WEIGHTS:
        scores = [a + weight * b.square() for a, b in zip(by_landmarks, by_words, strict=True)]
        tried[weight] = measure(states, scores)
    best = max(tried, key=lambda weight: sum(_recalls(tried[weight])))  # of equals the least
    return Selector(learned, best), tried[best]


# How well a selector finds


class Haystack:
    """Passages of many texts with the indexes of a selector's memory, in RAM only."""

    def __init__(self, selector: Selector, tokenizer: TokenText) -> None:
        self._selector, self._tokenizer = selector, tokenizer
        self._tokens, self._words = TokenIndex(selector.spec.width), WordIndex()
        self.scope: list[tuple[int, int, int]] = []

    def add_passages(self, passages: Sequence[Captured]) -> None:
        """Add a document of these passages."""
        number, selector = len(self.scope), self._selector
        kept = [found for one in passages if (found := selector.landmarks(one)) is not None]
        if kept:
            self._tokens.add(number, torch.cat(kept), [len(one.ids) for one in passages])
        texts = [self._tokenizer.decode(one.ids) for one in passages]
        starts = accumulate((len(text) + 1 for text in texts), initial=0)
        joined = "\n".join(texts)
        near = [around(joined, at, at + len(text)) for at, text in zip(starts, texts)]
        words = selector.words(zip(texts, near))
        if words is not None:
            self._words.add(number, BlockWords.of(words))
        self.scope.append((number, 0, len(passages)))

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        return self._tokens.maxima(q, scope)

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        return self._words.scores(words, scope)


@dataclass(frozen=True)
class Outcome:
    """The search result of one question: rank of the right passage, from 0; the best score; and how
    much the best wrong score rises when the number of passages doubles.
    """

    rank: int
    confidence: float
    growth: float


def _recalls(outcomes: Sequence[Outcome]) -> list[float]:
    """The share of questions whose right passage was among the best k, for each of KS."""
    return [sum(one.rank < k for one in outcomes) / len(outcomes) for k in KS]


def measure(states: States, scored: Sequence[Tensor]) -> list[Outcome]:
    """Outcomes of all questions of `states`. scored: for each question, scores [passages of the
    haystack, beginning with those of `states`].
    """
    found = []
    for asked, scores in zip(states.asked, scored, strict=True):
        answering = torch.zeros(len(scores), dtype=torch.bool)
        answering[list(asked.touched)] = True
        right, rest = scores[answering], scores[~answering]
        rank = int((rest > right.max()).sum())
        found.append(Outcome(rank, confidence(scores), _growth(rest)))
    return found


def gate_of(outcomes: Sequence[Outcome], passages: int) -> Gate:
    """A gate whose thresholds refuse each share of CAUTIONS of these questions in a memory of
    `passages` passages.

    The threshold rises with the number of passages half as fast as the best wrong score. Right
    scores do not rise, so the increase of errors is divided among both kinds.
    """
    best = sorted(outcome.confidence for outcome in outcomes)
    growth = sum(outcome.growth for outcome in outcomes) / len(outcomes) / 2
    at_512 = growth * math.log2(max(1, passages) / GATE_BLOCKS)
    a, b, c, d, e = (best[int(share * len(best))] - at_512 for share in CAUTIONS)
    return Gate((a, b, c, d, e), growth)


def _growth(scores: Tensor) -> float:
    """How much the best of scores [blocks] rises when their number doubles."""
    parts = [part.max() for part in scores.tensor_split(2**_HALVINGS) if len(part)]
    if len(parts) < 2**_HALVINGS:
        return 0.0
    return float(scores.max() - torch.stack(parts).mean()) / _HALVINGS
