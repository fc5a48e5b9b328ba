"""What chooses blocks once for a question: the protocol of selectors, and how many blocks their
scores mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memstore.disk.format.index_spec import IndexSpec
from memstore.index import text_words
from memstore.index.scope import Scope
from memstore.index.word_index import WordsBeside
from memstore.model.passages.selectors.captured_activations import Captured, Captures
from memstore.store.retrieve.shortlist import Shortlist

GATE_BLOCKS = 512
"""Among so many blocks a Gate's `least` holds: 32K tokens."""


GATE_TOGETHER = 4
"""So many of the best blocks may together make a Gate open."""


class Found(Protocol):
    """What selectors ask of a memory (memstore.store.MemoryStore)."""

    def token_maxima(self, q: Tensor, head: int, scope: Scope) -> Tensor:
        """q float32 [R, width] -> [R, blocks of the scope]: the best product with a block's token
        landmarks of a head.
        """

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """Words' hashes and weights -> float32 [blocks of the scope], BM25."""


class Selector(Protocol):
    """Says which blocks a question should read; all layers then read the same."""

    @property
    def spec(self) -> IndexSpec:
        """What a memory keeps for it."""

    @property
    def captures(self) -> Captures:
        """What forward passes have to capture."""

    def landmarks(self, captured: Captured) -> Tensor | None:
        """Of a passage [T, heads, width] in the spec's dtype, or None where it keeps none."""

    def words(self, text_of_block: Sequence[str]) -> list[list[tuple[int, int]]] | None:
        """Of each block its words and how often they are in it, or None where it needs none."""

    def scores(self, captured: Captured, question: str, store: Found, scope: Scope) -> Tensor:
        """float32 [blocks of the scope], higher = read it. captured: the tokens of the user's words
        alone; question: these words.
        """

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor] | None:
        """Rows [T, width] and weights [T] of a question, where a block's score is the sum over rows
        of weight times the greatest product with the block's landmarks; None where it is not, but
        for what counts little beside them.
        """

    def beside(self, question: str) -> WordsBeside | None:
        """The words that count beside these rows, where the score is the sum of both."""

    def adds(self, captured: Captured, store: Found, scope: Scope) -> Tensor | None:
        """float32 [blocks of the scope, rows]: what each row of the question adds to a block's
        score; None where that is not known.
        """


def spread(scores: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of scores [blocks]."""
    return float(scores.mean()), float(scores.std(correction=0))


def spread_of_all(
    scores: Tensor, question: str, spec: IndexSpec, store: Found
) -> tuple[float, float]:
    """The same of a selector's scores of all blocks, also where these are of a shortlist alone."""
    if not isinstance(store, Shortlist):
        return spread(scores)
    return store.spread if spec.heads else store.word_spread(asked(question))


def asked(question: str) -> dict[int, float]:
    """The words of a question, each once."""
    return dict.fromkeys(text_words.split(question), 1.0)


def standardise(scores: Tensor, of: tuple[float, float] | None = None) -> Tensor:
    """Scores [blocks] of this mean and deviation (None: their own) with mean 0 and deviation 1; all
    0 where they are all the same.
    """
    mean, deviation = spread(scores) if of is None else of
    return (scores - mean) / max(deviation, 1e-6)


def in_range(
    some: Tensor, scores: Tensor, score_range: float | None, deviation: float | None = None
) -> Tensor:
    """[n] bool: which of some scores [n] are within score_range standard deviations of all scores
    [blocks] below the best of these; None = all are. deviation: of all, where these are a
    shortlist's.
    """
    if score_range is None or not len(scores):
        return torch.ones(len(some), dtype=torch.bool)
    deviation = spread(scores)[1] if deviation is None else deviation
    return some >= scores.max() - score_range * deviation


def covered(adds: Tensor) -> Tensor:
    """Selector.adds of blocks -> [blocks]: what the first of them together have of a question,
    every row of it counted by the block that says most of it: the score of all as if they were one.
    """
    return adds.cummax(0).values.sum(1)


@dataclass(frozen=True)
class Gate:
    """Tells from the scores of blocks whether any of them answers.

    least: the confidence that takes, among GATE_BLOCKS blocks. growth: how much more it takes among
    twice as many, since the best of more blocks scores higher where nothing answers, too. together:
    how much more than that the GATE_TOGETHER best blocks have to cover between them to open it as
    well, for a question of several parts that no one block answers; None = they never do.
    """

    least: float
    growth: float = 0.0
    together: float | None = None

    def threshold(self, blocks: int, caution: float = 1.0) -> float:
        """The confidence that it takes among so many blocks. caution: see LookupSettings."""
        least = self.least + self.growth * math.log2(max(1, blocks) / GATE_BLOCKS)
        return least * caution if least > 0 else least

    def answers(self, scores: Tensor, caution: float = 1.0, *, blocks: int | None = None) -> bool:
        """Does any block of these scores [n] answer? blocks: from how many they were chosen, where
        they are a shortlist's.
        """
        return confidence(scores) >= self.threshold(blocks or len(scores), caution)

    def answer_together(
        self,
        scores: Tensor,
        together: float | None,
        caution: float = 1.0,
        *,
        blocks: int | None = None,
    ) -> bool:
        """Do some of these blocks answer a question of several parts together? together: what the
        GATE_TOGETHER best of them cover between them (`covered`); None = it is no such question.
        """
        if together is None or self.together is None:
            return False
        return together >= self.threshold(blocks or len(scores), caution) + self.together


def confidence(scores: Tensor) -> float:
    """The best of scores [blocks], by which a question that something answers is told from others;
    to be compared with those of the same selector only.
    """
    return float(scores.max()) if len(scores) else float("-inf")
