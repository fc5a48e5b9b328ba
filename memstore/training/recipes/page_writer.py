"""Writing a page of recall training: ids and their loss weights, sentence by sentence, with text of
the corpus between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memstore.training.recipes.facts import Sentence
from memstore.training.recipes.page_source import Source
from memstore.training.recipes.recall_config import RecallConfig


class PageWriter:
    """Content ids (no landmarks) and loss weights of one window or chunk of `size` tokens, in the
    order of writing.
    """

    def __init__(self, source: Source, config: RecallConfig, size: int) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self._source, self._config, self._size, self._rng = source, config, size, source.rng
        self._flowing = self._rng.random() < config.flowing
        self._place: int | None = None  # where in the corpus a flowing page's next filler begins

    def put(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def filler(self, length: float, *, exact: bool = False) -> None:
        """About `length` tokens of text, at times up to the end of a sentence only unless
        `exact`.
        """
        n = int(length)
        if n <= 0:
            return
        rng, source = self._rng, self._source
        if rng.random() < self._config.grass:
            first = rng.randrange(len(source.grass))
            ids: list[int] = []
            while len(ids) < n:
                ids += source.grass[first % len(source.grass)]
                first += 1
            self.put(ids[:n], self._config.filler_weight)
            return
        n = min(n, len(source.corpus))
        place = self._place
        if place is None or place + n > len(source.corpus):
            place = source.corpus.offset(rng, n)
        text = source.text(place, n)
        if not exact and rng.random() < 0.5:
            ends = np.flatnonzero(source.ends_sentence[text])
            text = text[: ends[-1] + 1] if len(ends) else text
        if self._flowing:
            self._place = place + len(text)
        self.put(text.tolist(), self._config.filler_weight)

    def finish(self) -> None:
        """Bring the page to exactly its size."""
        while len(self.ids) < self._size:
            self.filler(self._size - len(self.ids), exact=True)
        del self.ids[self._size :], self.weights[self._size :]

    def say(
        self,
        sentence: Sentence,
        value_weights: Sequence[float],
        *,
        last_weight: float | None = None,
        across: bool = False,
    ) -> tuple[int, int]:
        """Write a sentence; returns where its first value begins and how many tokens it has.

        `value_weights` are those of its values in turn, `last_weight` that of what follows the
        last. With `across`, filler first moves it so that the end of a block falls inside the first
        value, if it can.
        """
        rng, block = self._rng, self._config.block_size
        if self.ids and rng.random() < 0.15:
            self.put(self._source.encode("\n"), self._config.filler_weight)
        if not self.ids:
            separator = rng.choice(("", " "))
        else:
            separator = "" if self._source.ends_line[self.ids[-1]] else " "
        encoded = []
        for text, is_value in sentence.parts:
            encoded.append((self._source.encode(separator + text), is_value))
            separator = ""
        before = 0
        for ids, is_value in encoded:
            if is_value:
                if across and len(ids) > 1:
                    self.filler(
                        -(len(self.ids) + before + rng.randrange(1, len(ids))) % block, exact=True
                    )
                break
            before += len(ids)
        start, length = len(self.ids), 0
        values = iter(value_weights)
        for index, (ids, is_value) in enumerate(encoded):
            if is_value:
                if not length:
                    start, length = len(self.ids), len(ids)
                weight = next(values)  # no form has more values than the paper's pass key, two
                lead = 2 if ids[:1] == self._source.space else 1
                self.put(ids, weight)
                if weight >= 1:
                    # Behind its first digit a number can be continued by its own digits; the first
                    # one needs the fact.
                    self.weights[start + lead - 1] = weight * self._config.first_weight
            elif last_weight is not None and index == len(encoded) - 1:
                self.put(ids, last_weight)
            else:
                self.put(ids, self._config.filler_weight)
        return start, length

    def repeat(self, ids: list[int], known_from: int, first_weight: float, weight: float) -> None:
        """Write a repeated span; which one it is shows only after its first `known_from` tokens."""
        self.put(ids[:known_from], first_weight)
        self.put(ids[known_from:], weight)
