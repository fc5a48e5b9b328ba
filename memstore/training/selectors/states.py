"""States of a model for texts and questions, on which selectors are trained and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random

import torch
from torch import Tensor

from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.repositioned_attention import PassageModel
from memstore.model.passages.selector import Captured, Query, rooted
from memstore.training.reading_examples import Examples
from memstore.training.reading_questions import AskedContext

_ASKED = 4  # questions about a text
_PIECE = 16  # texts read at once


def captured(
    reader: PassageModel, rows: Sequence[Sequence[int]], layer: int, *, asked: bool
) -> list[Captured]:
    """Captured states of a layer for rows of ids, each computed alone after the prefix. asked:
    whether the rows are questions or passages; some adapters adapt only passages.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # fuller passes
    given = (rows[row] for row in order)
    adapt = reader.adapted_turns if asked else reader.adapted_passages
    read = encode(reader, given, layers=layer, layer=layer, adapt=adapt)
    found = dict(zip(order, (one.captured for one in read), strict=True))
    return [found[row] for row in range(len(rows))]


@dataclass(frozen=True)
class Asked:
    """A question, the passages that answer it, and its states: States.rows[first:end].

    context: number of its text.
    right: the passage that answers. touched: passages that hold the answer or are needed for it.
    Passages are numbered over all texts.
    """

    text: str
    context: int
    right: int
    touched: frozenset[int]
    first: int
    end: int


@dataclass(frozen=True)
class States:
    """States that enter a layer, scaled to a root mean square of 1.

    ids: [N], of all passages, one after another; ends: [P], the end of each passage in ids.
    passages: float16 [N, hidden]. rows: float16 [R, hidden], states of the questions' own words,
    one question after another; row_ids: [R]. texts: for each text its collection and the number of
    the passage after its last.
    """

    layer: int
    ids: Tensor
    ends: Tensor
    passages: Tensor
    rows: Tensor
    row_ids: Tensor
    asked: tuple[Asked, ...]
    texts: tuple[tuple[str, int], ...]

    def collections(self) -> Iterator[tuple[range, list[Asked]]]:
        """The passages of each collection, and the questions about them."""
        first = 0
        for name, texts in groupby(self.texts, lambda text: text[0]):
            *_, (_, end) = texts
            asked = [one for one in self.asked if self.texts[one.context][0] == name]
            yield range(first, end), asked
            first = end

    def query(self, asked: Asked) -> Query:
        """The search query of a question."""
        at = slice(asked.first, asked.end)
        return Query(Captured(self.row_ids[at].tolist(), {self.layer: self.rows[at]}), asked.text)

    def shown(self, passage: int) -> Captured:
        """The captured ids and states of a passage."""
        at = self._place(passage)
        return Captured(self.ids[at].tolist(), {self.layer: self.passages[at]})

    def passage(self, passage: int) -> Tensor:
        """The states float16 [n, hidden] of a passage."""
        return self.passages[self._place(passage)]

    def _place(self, passage: int) -> slice:
        start = int(self.ends[passage - 1]) if passage else 0
        return slice(start, int(self.ends[passage]))


def best_wrong(scores: Tensor, asked: Asked, first: int, most: int) -> list[int]:
    """At most `most` passages that do not answer a question, the best first, with scores above 0.
    scores: [passages], of those from number `first` on.
    """
    scores = scores.clone()
    scores[[at - first for at in asked.touched]] = -torch.inf
    best = scores.topk(min(most, len(scores)))
    pairs = zip(best.values.tolist(), best.indices.tolist())
    return [first + at for score, at in pairs if score > 0]


def read_states(
    contexts: Sequence[AskedContext],
    reader: PassageModel,
    layer: int,
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> States:
    """Compute the states of texts' passages, and of at most four questions of each text whose
    answer a passage holds. report: called with lines of progress.
    """
    examples, rng = Examples(contexts, reader), Random(seed)
    every, passages = list[Tensor](), list[Tensor]()
    asked, rows, row_ids = list[Asked](), list[Tensor](), list[int]()
    for first in range(0, len(contexts), _PIECE):
        numbers = range(first, min(first + _PIECE, len(contexts)))
        ids = [examples.ids[at] for number in numbers for at in examples.texts[number].passages]
        every += map(torch.tensor, ids)
        shown = captured(reader, ids, layer, asked=False)
        passages += [rooted(one.states[layer]).half() for one in shown]
        chosen = []
        for number in numbers:
            answered = [one for one in examples.texts[number].examples if one.right]
            chosen += rng.sample(answered, min(_ASKED, len(answered)))
        turns = [reader.turn_ids(one.asked.question, first=True) for one in chosen]
        read = [turn[: words.stop] for turn, words in turns]
        heard = captured(reader, read, layer, asked=True)
        for one, whole, (turn, words) in zip(chosen, heard, turns, strict=True):
            rows.append(rooted(whole.states[layer][words.start :]).half())
            row_ids += turn[words.start : words.stop]
            begin = asked[-1].end if asked else 0
            asked.append(
                Asked(
                    one.asked.question,
                    one.text,
                    next((at for at in one.right if at in one.holding), one.right[0]),
                    one.holding | set(one.right),
                    begin,
                    begin + len(words),
                )
            )
        report(f"{numbers.stop} of {len(contexts)} texts read")
    return States(
        layer,
        torch.cat(every),
        torch.tensor([len(ids) for ids in every]).cumsum(0),
        torch.cat(passages),
        torch.cat([*rows, passages[0][:0]]),
        torch.tensor(row_ids, dtype=torch.int64),
        tuple(asked),
        tuple((one.collection, one.passages.stop) for one in examples.texts),
    )
