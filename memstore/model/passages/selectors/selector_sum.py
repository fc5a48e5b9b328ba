"""Words as a selector, and the sum of several selectors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from memstore.disk.format.index_spec import IndexSpec
from memstore.errors import InvalidConfig
from memstore.index import text_words
from memstore.index.scope import Scope
from memstore.index.word_index import WordsBeside
from memstore.model.passages.selectors.captured_activations import Captured, Captures
from memstore.model.passages.selectors.selector import (
    Found,
    Selector,
    asked,
    spread_of_all,
    standardise,
)

_LITTLE = 0.1  # weight of the other parts, beside the first one's


class Words:
    """BM25: the blocks that share rare words with the question."""

    spec = IndexSpec("words", "bm25", 0, 0, "int8", words=True)
    captures = Captures()

    def landmarks(self, captured: Captured) -> None:
        return None

    def words(self, text_of_block: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [text_words.count(text) for text in text_of_block]

    def scores(self, captured: Captured, question: str, store: Found, scope: Scope) -> Tensor:
        """float32 [blocks of the scope], 0 where no word is shared."""
        return store.word_scores(asked(question), scope)

    def rows(self, captured: Captured) -> None:
        return None

    def beside(self, question: str) -> None:
        return None

    def adds(self, captured: Captured, store: Found, scope: Scope) -> None:
        return None


class Sum:
    """Scores of several selectors, each standardised over the blocks, weighted and added; told in
    the units of the first, whose best score says whether anything answers at all.

    One of them at most keeps token landmarks. Raises InvalidConfig for more.
    """

    def __init__(self, parts: Sequence[tuple[Selector, float]]) -> None:
        self.parts = tuple(parts)
        keeping = [selector for selector, _ in parts if selector.spec.heads]
        if not parts or len(keeping) > 1:
            raise InvalidConfig(
                f"one selector of a sum at most keeps token landmarks, not {len(keeping)}; "
                "leave the others out"
            )
        self._keeping = keeping[0] if keeping else parts[0][0]
        spec = self._keeping.spec
        named = " + ".join(selector.spec.name for selector, _ in parts)
        digest = hashlib.blake2b(
            "|".join(selector.spec.digest for selector, _ in parts).encode(), digest_size=16
        ).hexdigest()
        self._form = IndexSpec(
            named,
            digest,
            spec.heads,
            spec.width,
            spec.dtype,
            words=any(selector.spec.words for selector, _ in parts),
        )

    @property
    def spec(self) -> IndexSpec:
        return self._form

    @property
    def captures(self) -> Captures:
        every = [selector.captures for selector, _ in self.parts]
        return Captures(
            tuple(sorted({layer for captures in every for layer in captures.states})),
            tuple(sorted({layer for captures in every for layer in captures.heads})),
        )

    def landmarks(self, captured: Captured) -> Tensor | None:
        return self._keeping.landmarks(captured)

    def words(self, text_of_block: Sequence[str]) -> list[list[tuple[int, int]]] | None:
        for selector, _ in self.parts:
            if selector.spec.words:
                return selector.words(text_of_block)
        return None

    def scores(self, captured: Captured, question: str, store: Found, scope: Scope) -> Tensor:
        (first, own), *others = self.parts
        scores = first.scores(captured, question, store, scope)
        unit = spread_of_all(scores, question, first.spec, store)[1] / own
        for selector, weight in others:
            added = selector.scores(captured, question, store, scope)
            of_all = spread_of_all(added, question, selector.spec, store)
            scores = scores + weight * unit * standardise(added, of_all)
        return scores

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor] | None:
        """Of the first, where the others weigh so little that what it finds holds the best."""
        (first, own), *others = self.parts
        return first.rows(captured) if all(each <= _LITTLE * own for _, each in others) else None

    def beside(self, question: str) -> WordsBeside | None:
        (_, own), *others = self.parts
        for selector, weight in others:
            if isinstance(selector, Words):
                return WordsBeside(asked(question), weight / own)
        return None

    def adds(self, captured: Captured, store: Found, scope: Scope) -> Tensor | None:
        return self._keeping.adds(captured, store, scope)
