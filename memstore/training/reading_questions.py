"""Training examples of a reading adapter, made from questions about texts: gold passages, hard
distractors, question and answer.
"""

from __future__ import annotations

import io
import re
import unicodedata
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zstandard

from memstore.decode import from_json
from memstore.errors import InvalidInput
from memstore.model.adapter import TextTokenizer
from memstore.training.selectors.windows import WindowWriter

UNKNOWN = "I don't know."
"""The answer to a question that no passage answers."""

Cut = Callable[[str], list[list[int]]]
"""Splits a text into passages of token ids."""

_WORD = re.compile(r"\w+")
_REASONS = ("why", "how", "pourquoi", "comment", "warum", "wieso", "wie")
_POSTINGS = 400  # words in more passages than this are not used to find distractors
_MOST_OWN = 8  # passages of one context in an example


class AskedQuestion(msgspec.Struct, frozen=True):
    """A question. answers: the first is trained on; empty if the context has no answer. sentence:
    the answer as a whole sentence, if known.
    """

    question: str
    answers: list[str] = []
    sentence: str | None = None


class AskedContext(msgspec.Struct, frozen=True):
    """A text and its questions. title: the article it belongs to."""

    context: str
    questions: list[AskedQuestion]
    title: str = ""
    source: str = ""
    lang: str = "en"


@dataclass(frozen=True)
class Composed:
    """One training example: token ids of its passages in reading order, question and answer."""

    passages: Sequence[Sequence[int]]
    question: str
    answer: str


def read_questions(path: Path) -> list[AskedContext]:
    """Read a .jsonl or .jsonl.zst file. Raises InvalidInput, which names the invalid line."""
    with path.open("rb") as file:
        stream: Any = file
        if path.suffix == ".zst":
            stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        found = []
        for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8"), 1):
            try:
                found.append(from_json(line, AskedContext))
            except ValueError as error:
                raise InvalidInput(f"{path} line {number}: {error}") from None
    if not any(one.questions for one in found):
        raise InvalidInput(f"{path} holds no questions")
    return found


def planted_questions(
    texts: Sequence[str], tokenizer: TextTokenizer, windows: int, seed: int
) -> list[AskedContext]:
    """Questions about facts that are planted in prose, for a model without questions of its own.
    Raises InvalidInput for texts that are too short.
    """
    writer = WindowWriter(texts, tokenizer, lambda text: [], "train", seed)
    found = []
    for number in range(windows):
        facts = [writer.facts.literal() for _ in range(3)] + [writer.facts.reworded()]
        asked = [AskedQuestion(fact.question, [fact.value]) for fact in facts]
        found.append(AskedContext(writer.prose_with(facts), asked, title=f"window {number}"))
    return found


def plain_words(text: str) -> list[str]:
    """Words in lower case, without accents."""
    folded = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(c for c in folded if not unicodedata.combining(c)))


@dataclass(frozen=True)
class _Example:
    context: int
    asked: AskedQuestion
    right: tuple[int, ...]  # passages with the answer; empty if no single one has it


class Examples:
    """Questions with the passages of their texts; `compose` draws a new example each time."""

    def __init__(
        self, contexts: Iterable[AskedContext], cut: Cut, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """cut, decode: of the trained model."""
        self._passages: list[list[int]] = []
        self._words: list[set[str]] = []
        self._starts: list[int] = []  # of each context, its first passage
        self._titles: list[str] = []
        self.examples: list[_Example] = []
        self._holding: dict[str, list[int]] = defaultdict(list)  # word -> passages
        for number, one in enumerate(contexts):
            self._starts.append(len(self._passages))
            self._titles.append(one.title or f"#{number}")
            texts = []
            for ids in cut(one.context):
                words = plain_words(decode(ids))
                texts.append(" ".join(words))
                for word in set(words):
                    self._holding[word].append(len(self._passages))
                self._passages.append(ids)
                self._words.append(set(words))
            for asked in one.questions:
                self.examples.append(_Example(number, asked, self._right(number, texts, asked)))

    def _right(self, context: int, texts: Sequence[str], asked: AskedQuestion) -> tuple[int, ...]:
        """The passage that contains an answer verbatim; of several, the one that shares most
        words with the question.
        """
        start, wanted = self._starts[context], set(plain_words(asked.question))
        answers = [f" {' '.join(plain_words(answer))} " for answer in asked.answers]
        holding = [
            (len(wanted & self._words[start + at]), -at, start + at)
            for at, text in enumerate(texts)
            if any(answer.strip() and answer in f" {text} " for answer in answers)
        ]
        return (max(holding)[2],) if holding else ()

    def compose(
        self, example: _Example, most: int, rng: Random, unanswerable: float = 0.0
    ) -> Composed:
        """An example of at most `most` passages in random order; passages of one context stay in
        order. unanswerable: probability of leaving the answer out.
        """
        asked, first = example.asked, self._starts[example.context]
        end = self._end(example.context)
        answerable = bool(asked.answers) and rng.random() >= unanswerable
        own: list[int] = []
        if not answerable:
            if not asked.answers:  # related passages without the answer
                own = self._near(asked, range(first, end), max(1, most // 2))
        elif example.right:
            others = [at for at in range(first, end) if at not in example.right]
            rng.shuffle(others)
            own = sorted([*example.right, *others[: rng.randrange(most)]])
        else:
            own = self._near(asked, range(first, end), min(most, _MOST_OWN))
        groups = [own] if own else []
        fill = rng.randint(0, most - len(own)) if own and answerable else most - len(own)
        groups += [[at] for at in self._alike(example, max(fill, 1 if not own else 0))]
        rng.shuffle(groups)
        answer = _answer(asked) if answerable else UNKNOWN
        passages = [self._passages[at] for group in groups for at in group]
        return Composed(passages, asked.question, answer)

    def _end(self, context: int) -> int:
        starts = self._starts
        return starts[context + 1] if context + 1 < len(starts) else len(self._passages)

    def _near(self, asked: AskedQuestion, places: range, most: int) -> list[int]:
        """The run of `most` consecutive passages that shares most words with the question."""
        wanted = set(plain_words(asked.question))
        shared = [len(wanted & self._words[at]) for at in places]
        ends = range(max(1, len(places) - most + 1))
        start = max(ends, key=lambda at: sum(shared[at : at + most]))
        return list(places[start : start + most])

    def _alike(self, example: _Example, most: int) -> list[int]:
        """Hard distractors: passages of other titles that share rare words, best first."""
        if most <= 0:
            return []
        scores: Counter[int] = Counter()
        for word in set(plain_words(example.asked.question)):
            holding = self._holding.get(word, ())
            if 0 < len(holding) <= _POSTINGS:
                weight = log(1 + len(self._passages) / len(holding))
                for at in holding:
                    scores[at] += weight  # type: ignore[assignment]
        title = self._titles[example.context]
        found = []
        for at, _ in scores.most_common(most + 40):
            if self._titles[bisect_right(self._starts, at) - 1] != title:
                found.append(at)
            if len(found) == most:
                break
        return found


def _answer(asked: AskedQuestion) -> str:
    """The target answer: a whole sentence for why and how questions, if there is one."""
    first = next(iter(plain_words(asked.question)), "")
    if asked.sentence and first in _REASONS:
        return asked.sentence
    return asked.answers[0]


def drawn(examples: Sequence[_Example], rng: Random) -> Iterator[_Example]:
    """Examples in epochs, each in a new random order."""
    while True:
        order = list(examples)
        rng.shuffle(order)
        yield from order
