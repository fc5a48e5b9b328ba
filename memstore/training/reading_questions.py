"""Training examples of a reading adapter, made from questions about texts: gold passages, hard
distractors, question and answer.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from random import Random

import msgspec

from memstore.decode import from_json
from memstore.errors import InvalidInput
from memstore.hf.reading_adapter import UNKNOWN
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.repositioned_attention import PassageModel
from memstore.model.sentences import split
from memstore.training.corpus import lines_of

TOO_FEW = (
    "too few questions: training and evaluation each need some whose answer is in the text "
    "verbatim; give more"
)
_WORD = re.compile(r"\w+")
_REASONS = ("why", "how", "pourquoi", "comment", "warum", "wieso", "wie")
_POSTINGS = 400  # words in more passages than this are not used to find distractors
_MOST_OWN = 8  # passages of one context in an example
# of questions made from texts: characters of a part, parts of a title, questions of a part
_PART, _PARTS_OF_A_TITLE, _ASKED = 1200, 20, 3


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

    @property
    def collection(self) -> str:
        """Texts of one source and language belong together."""
        return f"{self.source} {self.lang}"


@dataclass(frozen=True)
class Composed:
    """One training example: token ids of its passages in reading order, question and answer."""

    passages: Sequence[Sequence[int]]
    question: str
    answer: str


def read_questions(path: Path) -> list[AskedContext]:
    """Read a .jsonl or .jsonl.zst file. Raises OSError, and InvalidInput, which names the line."""
    found = []
    for number, line in lines_of(path):
        try:
            found.append(from_json(line, AskedContext))
        except ValueError as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None
    if not any(one.questions for one in found):
        raise InvalidInput(f"{path} holds no questions")
    return found


def questions_of(texts: Sequence[str], count: int, seed: int) -> list[AskedContext]:
    """Questions that texts ask of themselves, for models that nobody has questions for: of `count`
    parts of some 1,200 characters, drawn at random, what is said about a word that one of the
    sentences has and the others do not; the answer is that sentence.
    """
    rng, parts = Random(seed), []
    for number, text in enumerate(texts):
        units = [text[one.start : one.end] for one in split(text)]
        ends = [*accumulate(map(len, units))]
        for at, some in groupby(zip(ends, units), lambda pair: pair[0] // _PART):
            sentences = [" ".join(sentence.split()) for _, sentence in some]
            parts.append((f"{number} {at // _PARTS_OF_A_TITLE}", sentences))
    known = Counter(word for _, some in parts for one in some for word in set(plain_words(one)))
    found = []
    for title, sentences in rng.sample(parts, min(count, len(parts))):
        asked = []
        for sentence in rng.sample(sentences, len(sentences)):
            others = {word for one in sentences if one != sentence for word in plain_words(one)}
            plain = {word: plain_words(word) for word in _WORD.findall(sentence) if len(word) > 3}
            own = [word for word, parts in plain.items() if others.isdisjoint(parts)]
            if own and 30 <= len(sentence) <= 240:
                rarest = min(own, key=lambda word: sum(known[part] for part in plain[word]))
                asked.append(AskedQuestion(f"What does it say about {rarest}?", [sentence]))
        if asked:
            found.append(AskedContext(" ".join(sentences), asked[:_ASKED], title, "text"))
    return found


def split_titles(
    contexts: Sequence[AskedContext], seed: int
) -> tuple[list[AskedContext], list[AskedContext]]:
    """Contexts to train on, and those of a twentieth of the titles, to measure with. Raises
    InvalidInput for questions of fewer than two titles, and where either part lacks answers.
    """
    titles = sorted({one.title for one in contexts})
    Random(seed).shuffle(titles)
    held = set(titles[: max(1, len(titles) // 20)])
    train, test = ([c for c in contexts if (c.title in held) is out] for out in (False, True))
    if not all(any(one.questions for one in part) for part in (train, test)):
        raise InvalidInput(
            "the questions are about fewer than two titles; give more or longer texts"
        )
    for part in (train, test):
        if not any(stands_in(asked, one.context) for one in part for asked in one.questions):
            raise InvalidInput(TOO_FEW)
    return train, test


def stands_in(question: AskedQuestion, text: str) -> bool:
    """Does a text hold an answer verbatim, but for case?"""
    return any(answer.lower() in text.lower() for answer in question.answers)


def drawn(contexts: Sequence[AskedContext], count: int, seed: int) -> list[AskedContext]:
    """About `count` contexts with answers; a collection's share grows with the square root of its
    size.
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


def plain_words(text: str) -> list[str]:
    """Words in lower case, without accents."""
    folded = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(c for c in folded if not unicodedata.combining(c)))


@dataclass(frozen=True)
class Example:
    context: int
    asked: AskedQuestion
    right: tuple[int, ...]  # passages that are needed; empty if no passage has the answer verbatim
    holding: frozenset[int]  # passages of the context that have an answer verbatim


class Examples:
    """Questions with the passages of their texts. `pools` draws examples that share passages, so
    that a forward pass computes a passage once for many questions.
    """

    def __init__(self, contexts: Iterable[AskedContext], reader: PassageModel) -> None:
        """reader: the model that cuts the texts into passages."""
        self._passages: list[list[int]] = []
        self._words: list[set[str]] = []
        self._starts: list[int] = []  # of each context, its first passage
        self._about: dict[tuple[str, str], list[int]] = defaultdict(list)  # contexts of a title
        self._titles: list[tuple[str, str]] = []  # of each context: source, title
        self._of: list[list[Example]] = []  # of each context
        self._sources: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._holding: dict[str, list[int]] = defaultdict(list)  # word -> passages
        read: list[tuple[list[str], list[AskedQuestion]]] = []
        for number, one in enumerate(contexts):
            self._starts.append(len(self._passages))
            self._titles.append((one.source, one.title or f"#{number}"))
            self._about[self._titles[-1]].append(number)
            self._sources[one.source, one.lang].append(number)
            texts = []
            for passage in passages_of(reader, [one.context]):
                ids = passage.ids.tolist()
                words = plain_words(reader.tokenizer.decode(ids))
                texts.append(f" {' '.join(words)} ")
                for word in set(words):
                    self._holding[word].append(len(self._passages))
                self._passages.append(ids)
                self._words.append(set(words))
            read.append((texts, one.questions))
        for number, (texts, questions) in enumerate(read):
            self._of.append([self._example(number, texts, asked) for asked in questions])

    def of(self, context: int) -> list[Example]:
        """The questions of a text."""
        return self._of[context]

    def passages(self, context: int) -> list[list[int]]:
        """The passages of a text."""
        return [self._passages[at] for at in self.own(context)]

    def _example(self, context: int, texts: Sequence[str], asked: AskedQuestion) -> Example:
        """The passage that contains an answer verbatim (of several, the one that shares most words
        with the question), and one more if it shares two rare words that the first lacks.
        """
        start = self._starts[context]
        wanted = {w for w in plain_words(asked.question) if len(self._holding[w]) <= _POSTINGS}
        answers = [f" {' '.join(plain_words(answer))} " for answer in asked.answers]
        holding = [
            start + at
            for at, text in enumerate(texts)
            if any(answer.strip() and answer in text for answer in answers)
        ]
        if not holding:
            return Example(context, asked, (), frozenset())
        best = max(holding, key=lambda at: (len(wanted & self._words[at]), -at))
        left = wanted - self._words[best]
        other = max(range(start, start + len(texts)), key=lambda at: len(left & self._words[at]))
        needed = {best, other} if len(left & self._words[other]) >= 2 else {best}
        return Example(context, asked, tuple(sorted(needed)), frozenset(holding))

    def pools(
        self, rng: Random, tokens: int, most: int, unanswerable: float
    ) -> Iterator[list[Composed]]:
        """Draw the questions of texts with passages of at most `tokens` tokens, for ever. Sources
        are drawn by the square root of their size.

        most: passages of an example; unanswerable: share of questions whose answer is left out.
        Raises InvalidInput if all texts are longer.
        """
        sources = {
            name: short
            for name, some in self._sources.items()
            if (short := [one for one in some if self._of[one] and 0 < self._size(one) <= tokens])
        }
        if not sources:
            raise InvalidInput(
                f"the texts to learn from, or those held out, are all empty or have more than "
                f"{tokens} tokens; split them"
            )
        names, weights = list(sources), [len(some) ** 0.5 for some in sources.values()]
        while True:
            main = rng.choice(sources[rng.choices(names, weights)[0]])
            chosen, size = [main], self._size(main)
            for other in self._others(main, rng):
                if size + self._size(other) <= tokens:
                    chosen.append(other)
                    size += self._size(other)
            places = [list(self.own(context)) for context in chosen]
            asked = [one for context in chosen for one in self._of[context]]
            rng.shuffle(asked)
            found = [self.compose(one, places, most, rng, unanswerable) for one in asked]
            if some := [one for one in found if one.passages]:
                yield some

    def compose(
        self,
        example: Example,
        places: Sequence[Sequence[int]],
        most: int,
        rng: Random,
        unanswerable: float = 0.0,
    ) -> Composed:
        """An example with passages of `places` (those of each text), texts in random order."""
        asked, own = example.asked, set(self.own(example.context))
        answerable = bool(asked.answers) and rng.random() >= unanswerable
        count = min(most, rng.choice((1, 2, 4, 8, most)))
        needed = set(example.right)
        if answerable and not needed:
            needed = set(self._near(asked, sorted(own), min(count, _MOST_OWN)))
        elif not answerable:
            needed = set() if asked.answers else set(self._near(asked, sorted(own), 1))
        spare = [at for some in places for at in some if at not in needed]
        if not answerable and asked.answers:
            spare = [at for at in spare if at not in example.holding | set(example.right)]
        extra = max(0, count - len(needed))
        taken = needed | set(rng.sample(spare, min(extra or not needed, len(spare))))
        groups = [[at for at in some if at in taken] for some in places]
        rng.shuffle(groups)
        passages = [self._passages[at] for group in groups for at in group]
        return Composed(passages, asked.question, _answer(asked) if answerable else UNKNOWN)

    def own(self, context: int) -> range:
        """The numbers of the passages of a text."""
        ends = [*self._starts[context + 1 : context + 2], len(self._passages)]
        return range(self._starts[context], ends[0])

    def _size(self, context: int) -> int:
        return sum(len(self._passages[at]) for at in self.own(context))

    def _near(self, asked: AskedQuestion, places: Sequence[int], most: int) -> Sequence[int]:
        """The run of `most` consecutive passages that shares most words with the question."""
        wanted = set(plain_words(asked.question))
        shared = [len(wanted & self._words[at]) for at in places]
        ends = range(max(1, len(places) - most + 1))
        start = max(ends, key=lambda at: sum(shared[at : at + most]))
        return places[start : start + most]

    def _others(self, context: int, rng: Random) -> list[int]:
        """Texts to read beside one: up to three of its title, up to three that share rare words
        with one of its questions.
        """
        same = [one for one in self._about[self._titles[context]] if one != context]
        found = rng.sample(same, min(len(same), rng.randrange(4)))
        if self._of[context]:
            found += self._alike(rng.choice(self._of[context]), rng.randrange(4))
        rng.shuffle(found)
        return [one for one in dict.fromkeys(found) if one != context]

    def _alike(self, example: Example, most: int) -> list[int]:
        """Texts of other titles with passages that share rare words with a question, best first."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(plain_words(example.asked.question)):
            holding = self._holding.get(word, ())
            if 0 < len(holding) <= _POSTINGS:
                for at in holding:
                    scores[at] += math.log(1 + len(self._passages) / len(holding))
        best = sorted(scores, key=lambda at: (-scores[at], at))
        contexts = dict.fromkeys(bisect_right(self._starts, at) - 1 for at in best)
        title = self._titles[example.context]
        return [one for one in contexts if self._titles[one] != title][:most]


def _answer(asked: AskedQuestion) -> str:
    """The target answer: a whole sentence for why and how questions, if there is one."""
    first = next(iter(plain_words(asked.question)), "")
    if asked.sentence and first in _REASONS:
        return asked.sentence
    return asked.answers[0]
