"""Texts with questions as windows: the token ids of passages and questions, which selectors learn
from and are measured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from memstore.model.passages.passage_protocol import PassageModel
from memstore.training.planted import PlantedQuestion
from memstore.training.reading_questions import AskedContext, Example, Examples

_ASKED = 4  # of people's questions about a text


@dataclass(frozen=True)
class Question:
    """A question as it is read, and where its answer stands.

    kind, key: as in PlantedQuestion, or "asked" (by people). lead: ids read before the user's
    words; ids: of the user's words; text: these words. passage: the window's passage that answers,
    -1 if none; touched: all passages that hold the answer, or are needed for it.
    """

    kind: str
    lead: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    key: str = ""
    passage: int = -1
    touched: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """The passages of a text, and the questions for them. source: the collection of people's
    questions; "" for planted facts.
    """

    passages: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    source: str = ""


def firsts(windows: Sequence[Window]) -> list[int]:
    """Of each window the number of its first passage, those of all windows counted on."""
    return [0, *accumulate(len(window.passages) for window in windows)][: len(windows)]


def windows_of(contexts: Sequence[AskedContext], reader: PassageModel, seed: int) -> list[Window]:
    """Texts as windows of a reader's passages. Each has at most four of people's questions, of
    those whose answer a passage holds; and of planted questions these and those without an answer.
    """
    examples, rng, windows = Examples(contexts, reader), Random(seed), []

    def question(example: Example, first: int) -> Question:
        asked = example.asked
        kind, key = "asked", ""
        if isinstance(asked, PlantedQuestion):
            kind, key = asked.kind, asked.key
        ids, words = reader.turn_ids(asked.question, first=True)
        lead, own = tuple(ids[: words.start]), tuple(ids[words.start : words.stop])
        right = min(example.right, key=lambda at: at not in example.holding, default=first - 1)
        touched = tuple(sorted(at - first for at in example.holding | set(example.right)))
        return Question(kind, lead, own, asked.question, key, right - first, touched)

    for number, context in enumerate(contexts):
        planted, people = [], []
        for one in examples.of(number):
            if isinstance(one.asked, PlantedQuestion):
                planted += [one] if one.right or not one.asked.answers else []
            elif one.right:
                people.append(one)
        people = rng.sample(people, min(_ASKED, len(people)))
        first = examples.own(number).start
        passages = tuple(tuple(ids) for ids in examples.passages(number))
        questions = tuple(question(one, first) for one in [*planted, *people])
        windows.append(Window(passages, questions, "" if planted else context.collection))
    return windows
