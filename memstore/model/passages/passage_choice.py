"""Which passages a question reads: those that its scores mean, each text once, where the gate lets
it through.

A passage is identified by its tokens. Copies of one text have nearly the same score, not the same
bits: rounding depends on how many blocks one product scores, and on the machine that read a copy.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from memstore.index.block_rows import Scope
from memstore.index.word_index import split_words
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.repositioned_attention import PassageModel, RepositionedAttention
from memstore.model.passages.selector import GATE_TOGETHER, Captured, Scored, covered
from memstore.model.questions import spelled
from memstore.store.memory_store import MemoryStore

STEP = 256  # tokens of a longer text that are read at once
_PART = 0.04  # of a question, which has weight 1, that a block has to add to what better ones cover

# By how much the scores of copies may differ: in standard deviations of all scores, since a step of
# an int8 landmark may be another where another machine computed it; and at least by the rounding of
# float32, as a share of the largest score.
_ALIKE, _ROUNDING = 0.1, 1e-5

Content = Callable[[int, int], Hashable]
"""What identifies the text of a block (document, block): equal for blocks of the same tokens."""


@dataclass(frozen=True)
class Chosen:
    """A passage that is read. same: other places (document, block) where the same text stands."""

    document: int
    block: int
    score: float = 0.0
    same: tuple[tuple[int, int], ...] = ()


class Candidates:
    """The best passages of a question, and by what each was found. Copies of one text are one
    candidate, at the last of their places.
    """

    def __init__(
        self, found: Scored, k: int, adds: Callable[[Scope], Tensor | None], content: Content
    ) -> None:
        """k: how many at most; adds: Selector.adds of blocks."""
        self.scores, self._deviation, self._content = found.scores, found.deviation, content
        self._scope = [run for run in found.scope if run[2] > run[1]]
        self.blocks = found.blocks
        self._starts = [0, *accumulate(end - first for _, first, end in self._scope)]
        self._best = self.distinct(k)
        runs = [(one.document, one.block, one.block + 1) for one in self._best]
        self._covers = adds(runs)

    def distinct(self, k: int) -> list[Chosen]:
        """The best k passages of different texts, best first. Texts are looked up only where two
        scores are so near that the passages may be copies.
        """
        apart, n = 0.0, 2 * k  # by how much the scores of copies may differ
        if len(self.scores):
            largest = float(self.scores.abs().max())
            apart = max(_ROUNDING * largest, _ALIKE * self._deviation)
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
                return [self._once(some) for some in list(copies.values())[:k]]
            n *= 4

    def _once(self, copies: list[tuple[float, int]]) -> Chosen:
        """One passage for all copies (score, candidate) of a text, best first."""
        *others, last = [
            self._place(candidate) for _, candidate in sorted(copies, key=itemgetter(1))
        ]
        return Chosen(*last, copies[0][0], tuple(others))

    def best(self, most: int) -> list[Chosen]:
        """Passages, best first, at most so many, whether or not they are read."""
        ranked = self.scores.topk(min(most, len(self.scores)))
        return [
            Chosen(*self._place(candidate), score)
            for candidate, score in zip(ranked.indices.tolist(), ranked.values.tolist())
        ]

    @property
    def lead(self) -> float:
        """How much more the best scores than the next other text, in standard deviations of all
        scores; 0 where there is none.
        """
        best = self.distinct(2)
        if len(best) < 2 or not self._deviation:
            return 0.0
        return (best[0].score - best[1].score) / self._deviation

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
        if self._covers is None:
            return torch.zeros(len(self._best))
        return covered(self._covers).diff(prepend=torch.zeros(1))

    def meant(self, settings: LookupSettings, *, parts: bool) -> list[Chosen]:
        """Those that are meant, in the order of the text: that score nearly as high as the best
        (settings.score_range), and of a question of several `parts` those that say a part of it
        which no better one says.
        """
        best = torch.tensor([one.score for one in self._best])
        means = torch.ones(len(best), dtype=torch.bool)
        if settings.score_range is not None and len(self.scores):
            means = best >= self.scores.max() - settings.score_range * self._deviation
        if parts:
            means |= self._adds() >= _PART
        chosen = [one for one, meant in zip(self._best, means.tolist()) if meant]
        wanted = {one.document for one in chosen}
        order = {run[0]: at for at, run in enumerate(self._scope) if run[0] in wanted}
        return sorted(chosen, key=lambda one: (order[one.document], one.block))

    def _place(self, candidate: int) -> tuple[int, int]:
        """Document and block of a candidate."""
        at = bisect_right(self._starts, candidate) - 1
        document, first, _ = self._scope[at]
        return document, first + candidate - self._starts[at]


# Passages of a scope whose words are looked up by the hundred. Larger scopes are searched by lists,
# so that their words need not be read.
_MOST_SPELLED = 1 << 14


def spelled_as_held(reader: PassageModel, store: MemoryStore, scope: Scope, question: str) -> str:
    """A question with misspelt words as passages of the scope spell them: see `spelled`. A word
    that is one token of the model is not misspelt. Unchanged for large scopes, and for selectors
    without words.
    """
    index = store.retrieval.selected
    if index is None or sum(end - first for _, first, end in scope) > _MOST_SPELLED:
        return question

    def is_common(word: str) -> bool:
        return len(reader.tokenizer.encode(f" {word}")) == 1

    def holding(words: Sequence[str]) -> Sequence[int]:
        counts = index.holding([split_words(word)[0] for word in words], scope)
        return [1] * len(words) if counts is None else counts  # not known: nothing is changed

    return spelled(question, is_common, holding)


# What the selector sees of a question: its states behind the local turns, without memory


class CapturingForward:
    """A text behind the reader's prefix that is read on, token by token; of what was read long ago
    no more is held than `most` tokens.
    """

    def __init__(self, reader: PassageModel, most: int) -> None:
        self._reader, self._most = reader, most
        self._attention = RepositionedAttention(reader, adapt=reader.adapted_turns)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Captured:
        """Read tokens; what they show."""
        attention, captures, parts = self._attention, self._reader.selector.captures, []
        if not captures.layers or not ids:
            return Captured(list(ids))
        for piece in pieces(ids, attention.local, self._most):
            held = attention.local
            attention.let_go(min(held, max(0, held + len(piece) - self._most)))
            captured = Captured(list(piece))
            enter = partial(captured.keep_states, captures)
            given = torch.tensor([captured.ids], device=self._reader.device)
            attention.begin()
            states = self._reader.hidden(
                given, attention.attend, layers=captures.layers, enter=enter, adapt=attention.adapt
            )
            enter(captures.layers, states)
            parts.append(captured)
        return Captured.joined(parts)

    def fork(self) -> "CapturingForward":
        """Another forward pass, that has read the same."""
        other = CapturingForward(self._reader, self._most)
        other._attention = self._attention.fork()
        return other


def pieces(ids: Sequence[int], held: int, most: int) -> list[Sequence[int]]:
    """Ids that follow `held` tokens, as they are read where `most` are held: at once where nothing
    has to leave.
    """
    if held + len(ids) <= most:
        return [ids]
    step = min(STEP, most)
    return [ids[at : at + step] for at in range(0, len(ids), step)]


def capture(reader: PassageModel, ids: Sequence[int]) -> Captured:
    """What the reader's selector needs to see of ids that stand behind the prefix."""
    return CapturingForward(reader, len(ids)).read(ids)


class DialogueBuffer:
    """Ids behind the prefix; the selector reads them without memory when that is first needed,
    every token once.
    """

    def __init__(self, reader: PassageModel, most: int) -> None:
        """most: tokens that are held at most."""
        self.ids: list[int] = []  # that have not left, oldest first
        self.tokens = 0  # read so far, with those that left
        self._forward = CapturingForward(reader, most)
        self._seen = 0  # of `ids`, how many that has read
        self._ahead: tuple[list[int], CapturingForward] | None = None

    def look_ahead(self, ids: Sequence[int], words: range) -> Captured:
        """What the words of a turn show that is about to be read."""
        if self._seen < len(self.ids):
            self._forward.read(self.ids[self._seen :])
            self._seen = len(self.ids)
        forward = self._forward.fork()
        shown = forward.read(ids)
        self._ahead = list(ids), forward
        return shown.part(words)

    def extend(self, ids: Sequence[int]) -> None:
        """These ids are read."""
        ahead, self._ahead = self._ahead, None
        self.ids.extend(ids)
        self.tokens += len(ids)
        if ahead is not None and ahead[0] == list(ids):
            self._forward, self._seen = ahead[1], len(self.ids)

    def let_go(self, tokens: int) -> None:
        """Forget the oldest tokens."""
        self.ids = self.ids[tokens:]
        self._seen = max(0, self._seen - tokens)
