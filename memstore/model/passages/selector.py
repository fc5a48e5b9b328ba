"""Choose the passages that a question reads. A selector scores passages by words, a learned
projection, or both; a gate decides from the scores whether any passage answers; and of chosen
passages with the same text, one is read.

A passage is identified by its tokens. Copies of one text have nearly the same score, but not the
same bits: rounding depends on how many blocks one product scores, and on the machine that ingested
a copy.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.disk.tables.runs import IndexSpec
from memstore.index import word_index
from memstore.index.block_rows import Scope, locator
from memstore.index.word_index import WordsBeside
from memstore.model.lookup_settings import CAUTION, LookupSettings, Steps, at_caution
from memstore.store.memory_store import MemoryStore


@dataclass
class Captured:
    """What a forward pass captured of consecutive tokens: the states that enter a layer."""

    ids: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)  # layer -> [T, hidden_size]

    def part(self, tokens: range) -> "Captured":
        """What was captured of some of the tokens."""
        at = slice(tokens.start, tokens.stop)
        return Captured(self.ids[at], {layer: states[at] for layer, states in self.states.items()})

    @classmethod
    def joined(cls, parts: "Iterable[Captured]") -> "Captured":
        """Join what was captured of consecutive pieces of a text."""
        some = [part for part in parts if part.ids]
        if len(some) < 2:
            return some[0] if some else cls([])
        return cls(
            [token for part in some for token in part.ids],
            {layer: torch.cat([part.states[layer] for part in some]) for layer in some[0].states},
        )


_STEPS = 127  # a landmark is a unit vector times this, in int8
_LEAST_IDF = 0.05


@dataclass(frozen=True)
class Projection:
    """Weights of the learned projection. hidden: size of the model's states; width: of a landmark.

    projection: [hidden, width]. document_*, question_*: mean and deviation [hidden] of the states
    of documents and of questions. attend: [hidden], weighs a question's token in addition to its
    idf. idf: float16 [vocabulary], log of the inverse frequency of a token among blocks.
    """

    projection: Tensor
    document_mean: Tensor
    document_deviation: Tensor
    question_mean: Tensor
    question_deviation: Tensor
    attend: Tensor
    idf: Tensor


class Learned:
    """score(B) = sum over the question's tokens i of w_i max over j in B of <q_i, d_j>.

    d_j and q_i: states that enter `layer`, divided by their root mean square, standardised
    (separately for documents and questions), projected by one matrix, and normalised to unit
    length. w = softmax(attend . x_i + ln idf_i) over the question's own tokens.
    """

    def __init__(self, layer: int, projection: Projection) -> None:
        self.layer, self.projection = layer, projection
        self.width: int = projection.projection.shape[1]
        digest = hashlib.blake2b(str(layer).encode(), digest_size=16)
        for tensor in (
            projection.projection,
            projection.document_mean,
            projection.document_deviation,
        ):
            digest.update(tensor.contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()  # of all that landmarks depend on

    def landmarks(self, captured: Captured) -> Tensor:
        """Landmarks int8 [T, width] of captured tokens."""
        projection = self.projection
        x = rooted(captured.states[self.layer])
        x = (x - projection.document_mean) / projection.document_deviation
        units = F.normalize(x @ projection.projection, dim=-1)
        return (units * _STEPS).round().to(torch.int8).cpu()

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor]:
        """The question's unit vectors [T, width] and their weights [T], which sum to 1."""
        projection = self.projection
        x = rooted(captured.states[self.layer])
        x = (x - projection.question_mean) / projection.question_deviation
        rare = projection.idf[torch.as_tensor(captured.ids)].float().clamp_min(_LEAST_IDF)
        weights = (x @ projection.attend + rare.log()).softmax(0)
        return F.normalize(x @ projection.projection, dim=-1), weights


def rooted(states: Tensor) -> Tensor:
    """States [..., hidden] scaled to a root mean square of 1, float32 on the CPU."""
    states = states.float().cpu()
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5)


GATE_BLOCKS = 512
"""Number of blocks, 32K tokens, for which a Gate's `least` is calibrated."""


GATE_TOGETHER = 4
"""Number of best blocks that may open a Gate together."""


# Of a question that refers to the one before: how much the words and the tokens of that one count.
_WORDS_BEFORE, _TOKENS_BEFORE = 0.25, 0.2
# Deviations that blocks of the document of the question before gain: where this question refers to
# it, and where it does not; and the block after in the first case, since conversations move on
# (arXiv 1808.07036).
_REFERRED, _SAME, _NEXT = 2.0, 1.0, 0.5


@dataclass(frozen=True)
class Query:
    """What passages are searched by. captured: of the user's words alone; text: these words.
    before: the question that this one refers to ("How loud is it?"); its words have a quarter
    of the weight, its tokens a fifth.
    """

    captured: Captured
    text: str
    before: "Query | None" = None

    @property
    def words(self) -> dict[int, float]:
        """The hash and the weight of each word."""
        words = word_index.weigh_words(self.text)
        if self.before is None:
            return words
        earlier = word_index.weigh_words(self.before.text)
        return {word: _WORDS_BEFORE * weight for word, weight in earlier.items()} | words

    def rows(self, learned: "Learned") -> tuple[Tensor, Tensor]:
        """As Learned.rows, for both questions."""
        rows, weights = learned.rows(self.captured)
        if self.before is None:
            return rows, weights
        earlier, theirs = learned.rows(self.before.captured)
        shares = torch.cat([weights, _TOKENS_BEFORE * theirs]) / (1 + _TOKENS_BEFORE)
        return torch.cat([rows, earlier]), shares


class Found(Protocol):
    """The lookups that selectors need: a memory's index, or a shortlist of it."""

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """For q float32 [R, width], the greatest product of each row with a block's token
        landmarks: [R, blocks of the scope].
        """

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """WordIndex.scores for words' hashes and weights, float32 [blocks of the scope]."""


class Selector:
    """Scores the blocks that a question may read; all layers then read the same blocks.

    Without a learned part, the score of a block is BM25 as a share of the most that is possible: 0
    if it shares no word with the question. With one, it is the learned score plus word_weight times
    the square of that share, since few shared words say little. Neither depends on the other blocks
    but for how rare words are: so the best score says whether any block answers.
    """

    def __init__(self, learned: Learned | None = None, word_weight: float = 0.0) -> None:
        """word_weight: weight of BM25 next to a learned part; 0: no words are stored. Of a large
        scope only blocks are scored that landmarks or a rare word find; up to a weight of 0.5 the
        best ones are among these.
        """
        self.learned, self.word_weight = learned, word_weight
        self.layer = 0 if learned is None else learned.layer  # whose states it needs; 0: none
        self.spec = _spec(learned, word_weight)  # what a memory keeps for it

    def landmarks(self, captured: Captured) -> Tensor | None:
        """Token landmarks of a passage, int8 [T, width]; None if this selector stores none."""
        return None if self.learned is None else self.learned.landmarks(captured)

    def words(self, texts: Iterable[tuple[str, str]]) -> list[list[tuple[int, int]]] | None:
        """Words of blocks, each given as (text, surrounding text): see word_index.count_words. None
        if this selector stores no words.
        """
        return [word_index.count_words(*some) for some in texts] if self.spec.words else None

    def scores(self, query: Query, store: Found, scope: Scope) -> Tensor:
        """Scores float32 [blocks of the scope]; a higher score is better."""
        by_words = store.word_scores(query.words, scope) if self.spec.words else None
        if self.learned is None:
            assert by_words is not None
            return by_words
        rows, weights = query.rows(self.learned)
        learned = weights @ store.token_maxima(rows, scope)
        return learned if by_words is None else learned + self.word_weight * by_words.square()

    def adds(self, query: Query, store: Found, scope: Scope) -> Tensor | None:
        """What each row of the question adds to the score of each block, float32 [blocks of the
        scope, rows]; None without a learned part.
        """
        if self.learned is None:
            return None
        rows, weights = query.rows(self.learned)
        return (weights[:, None] * store.token_maxima(rows, scope)).T


_WORDS = "bm25 of words and stems"  # what is counted; a memory of anything else is refused


def _spec(learned: Learned | None, word_weight: float) -> IndexSpec:
    if learned is None:
        return IndexSpec("words", _WORDS, words=True)
    if not word_weight:
        return IndexSpec("learned", learned.digest, learned.width)
    digest = hashlib.blake2b(f"{learned.digest}|{_WORDS}".encode(), digest_size=16).hexdigest()
    return IndexSpec("learned + words", digest, learned.width, words=True)


# By how much the scores of copies may differ: in standard deviations of all scores, since a step of
# an int8 landmark may be another where another machine computed it; and at least by the rounding of
# float32, as a share of the largest score.
_ALIKE, _ROUNDING = 0.1, 1e-5


class Scored(NamedTuple):
    """Scores of blocks, and the blocks that have them."""

    scores: Tensor  # float32 [blocks of `scope`]
    scope: Scope
    store: Found  # where these blocks are looked up
    deviation: float  # standard, of the scores of all blocks of the whole scope
    blocks: int  # of the whole scope
    alike: float = _ALIKE  # deviations by which the scores of copies may differ

    @property
    def best(self) -> tuple[int, int] | None:
        """Document and block of the best one; None if there is none."""
        return locator(self.scope)(int(self.scores.argmax())) if len(self.scores) else None

    def after(self, place: tuple[int, int], *, refers: bool) -> "Scored":
        """The scores for a question that follows another one, whose best block was at `place`
        (document, block): higher for blocks of its document. The best one keeps its score. refers:
        whether the question refers to that one.
        """
        document, block = place
        same, after = (_REFERRED, _NEXT) if refers else (_SAME, 0.0)
        start, more = 0, torch.zeros_like(self.scores)
        for found, first, end in self.scope:
            if found == document:
                more[start : start + end - first] = same
                if first <= block + 1 < end:
                    more[start + block + 1 - first] += after
            start += end - first
        scores = self.scores + more * self.deviation
        kept = more[scores.argmax()] * self.deviation if start else 0.0
        return self._replace(scores=scores - kept, alike=_ALIKE + same + after)


def score_blocks(
    selector: Selector,
    query: Query,
    store: MemoryStore,
    scope: Scope,
    around: tuple[int, int] | None = None,
) -> Scored:
    """Score the blocks of a scope: all of them, or a shortlist of a large scope. around: see
    Retrieval.shortlist. Raises what Retrieval's lookups raise.
    """
    learned, weight, short = selector.learned, selector.word_weight, None
    if learned is not None:
        beside = WordsBeside(query.words, weight) if weight else None
        short = store.retrieval.shortlist(*query.rows(learned), scope, beside, around)
    if short is not None:
        scores = selector.scores(query, short, short.scope)
        return Scored(scores, short.scope, short, short.deviation, short.blocks)
    selected = store.retrieval.selected
    assert selected is not None
    scores = selector.scores(query, selected, scope)
    return Scored(scores, scope, selected, float(scores.std(correction=0)), len(scores))


def covered(adds: Tensor) -> Tensor:
    """For each of the blocks [blocks] of Selector.adds, the score of it and all blocks before it as
    if they were one block: each row of the question counts with its greatest value.
    """
    return adds.cummax(0).values.sum(1)


@dataclass(frozen=True)
class Gate:
    """Decides from the scores of blocks whether any of them answers.

    least: for each of CAUTIONS, the confidence required among GATE_BLOCKS blocks. growth: how much
    more is required among twice as many, because the best of more wrong blocks scores higher.
    together: for a question of several parts that no single block answers, how much more than this
    confidence the GATE_TOGETHER best blocks must cover together; None: they never open the gate.
    """

    least: Steps
    growth: float = 0.0
    together: float | None = None

    def threshold(self, blocks: int, caution: float = CAUTION) -> float:
        """The confidence required among so many blocks. caution: see LookupSettings."""
        if not caution:
            return -math.inf
        growth = self.growth * math.log2(max(1, blocks) / GATE_BLOCKS)
        return at_caution(self.least, caution) + growth

    def answers(self, scores: Tensor, blocks: int, caution: float = CAUTION) -> bool:
        """Whether any block answers; scores: [n], the best of so many blocks."""
        return confidence(scores) >= self.threshold(blocks, caution)

    def answer_together(
        self, together: float | None, blocks: int, caution: float = CAUTION
    ) -> bool:
        """Whether several blocks together answer a question of several parts. together: what the
        GATE_TOGETHER best ones cover together (`covered`); None if it is no such question.
        """
        if together is None or self.together is None:
            return False
        return together >= self.threshold(blocks, caution) + self.together


def confidence(scores: Tensor) -> float:
    """The best of scores [blocks], which the gate compares with its threshold; -inf without scores.
    Only scores of the same selector are comparable.
    """
    return float(scores.max()) if len(scores) else float("-inf")


# The choice

_PART = 0.04  # of a question, which has weight 1, that a block has to add to what better ones cover
_NEAR = 0.5  # deviations below the best within which passages are attended to alike

Content = Callable[[int, int], Hashable]
"""What identifies the text of a block (document, block): equal for blocks of the same tokens."""


@dataclass(frozen=True)
class Chosen:
    """A passage that is read. same: other places (document, block) of the same text. bias: added to
    the attention logits of its tokens.
    """

    document: int
    block: int
    score: float = 0.0
    same: tuple[tuple[int, int], ...] = ()
    bias: float = 0.0


class Candidates:
    """The best passages for a question, and what each adds to its score. Copies of one text are one
    candidate, at the last of their places.
    """

    def __init__(
        self, found: Scored, k: int, adds: Callable[[Scope], Tensor | None], content: Content
    ) -> None:
        """k: maximum number of candidates; adds: Selector.adds of blocks."""
        self.scores, self._deviation, self._content = found.scores, found.deviation, content
        self._alike = found.alike
        self._scope, self._place = found.scope, locator(found.scope)
        self.blocks = found.blocks
        self._best = self.distinct(k)
        self._find = adds

    def distinct(self, k: int) -> list[Chosen]:
        """The best k passages with different texts, best first. Texts are looked up only if two
        scores are so close that the passages may be copies.
        """
        apart, n = 0.0, 2 * k  # by how much the scores of copies may differ
        if len(self.scores):
            largest = float(self.scores.abs().max())
            apart = max(_ROUNDING * largest, self._alike * self._deviation)
        text = cache(lambda candidate: self._content(*self._place(candidate)))
        while True:
            ranked = self.scores.topk(min(n, len(self.scores)))
            scored = zip(ranked.values.tolist(), ranked.indices.tolist())
            places = sorted(scored, key=lambda one: (-one[0], one[1]))
            near = [False, *(a - b <= apart for (a, _), (b, _) in pairwise(places)), False]
            copies: dict[Hashable, list[tuple[float, int]]] = {}
            least = float("-inf")  # that a copy of the kth may score
            for at, (score, candidate) in enumerate(places):
                if score < least:
                    break
                may_be_copy = near[at] or near[at + 1]
                key = text(candidate) if may_be_copy else self._place(candidate)
                copies.setdefault(key, []).append((score, candidate))
                if len(copies) == k:
                    least = max(least, score - apart)
            if len(copies) >= k or n >= len(self.scores):
                break
            n *= 4
        found = []
        for some in list(copies.values())[:k]:
            *others, last = map(self._place, sorted(candidate for _, candidate in some))
            found.append(Chosen(*last, some[0][0], tuple(others)))
        return found

    def best(self, most: int) -> list[Chosen]:
        """At most `most` passages, best first, whether or not they are chosen."""
        ranked = self.scores.topk(min(most, len(self.scores)))
        return [
            Chosen(*self._place(candidate), score)
            for candidate, score in zip(ranked.indices.tolist(), ranked.values.tolist())
        ]

    @property
    def together(self) -> float | None:
        """What the best GATE_TOGETHER candidates cover of a question of as many parts; None without
        a learned part, or if one of them covers no part of its own.
        """
        adds = self._adds[:GATE_TOGETHER]
        several = len(adds) == GATE_TOGETHER and bool((adds >= _PART).all())
        return float(adds.sum()) if several else None

    @cached_property
    def _adds(self) -> Tensor:
        """[n], best first: what each candidate covers of the question beyond those before it; zeros
        without a learned part.
        """
        covers = self._find([(one.document, one.block, one.block + 1) for one in self._best])
        if covers is None:
            return torch.zeros(len(self._best))
        return covered(covers).diff(prepend=torch.zeros(1))

    def meant(self, settings: LookupSettings, *, parts: bool) -> list[Chosen]:
        """The passages to read, in document order: those that score nearly as high as the best
        (settings.score_range), with a bias that is lower for lower scores (settings.score_bias);
        and, if the question has several `parts`, those that cover a part which no better one
        covers.
        """
        best = torch.tensor([one.score for one in self._best])
        means = torch.ones(len(best), dtype=torch.bool)
        if settings.score_range is not None and len(self.scores):
            means = best >= self.scores.max() - settings.score_range * self._deviation
        below = (best - best[:1]) / max(self._deviation, 1e-6) + _NEAR
        below = below.clamp(max=0) * settings.score_bias * means
        if parts:
            means |= self._adds >= _PART
        found = zip(self._best, means.tolist(), below.tolist())
        chosen = [replace(one, bias=bias) for one, meant, bias in found if meant]
        wanted = {one.document for one in chosen}
        order = {run[0]: at for at, run in enumerate(self._scope) if run[0] in wanted}
        return sorted(chosen, key=lambda one: (order[one.document], one.block))
