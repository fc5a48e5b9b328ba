"""Training examples of a reading adapter, made from questions about texts: the passages that a
question needs, hard distractors, and the answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from memstore.errors import InvalidInput
from memstore.hf.reading_adapter import UNKNOWN
from memstore.model.passages.passage_encoding import passages_of
from memstore.model.passages.repositioned_attention import PassageModel
from memstore.training.reading_questions import AskedContext, AskedQuestion, plain_words

_POSTINGS = 400  # words in more passages than this are not used to find distractors
_MOST_OWN = 8  # passages of one text in an example
_UNANSWERABLE = 0.08  # share of questions whose answer is left out


class Composed(NamedTuple):
    """One training example: token ids of its passages in reading order, question and answer."""

    passages: Sequence[Sequence[int]]
    question: str
    answer: str


class Example(NamedTuple):
    """A question about a text. right: the passages that it needs, none if no passage contains an
    answer verbatim; holding: passages that do. Texts and passages are numbers.
    """

    text: int
    asked: AskedQuestion
    right: tuple[int, ...] = ()
    holding: frozenset[int] = frozenset()


@dataclass(eq=False)
class Text:
    """A text: its number, the numbers of its passages, and their tokens in all."""

    collection: str
    about: tuple[str, str]  # source and title
    passages: range
    tokens: int
    examples: list[Example] = field(default_factory=list)


class Examples:
    """Questions with the passages of their texts. `pools` draws examples that share passages, so
    that a forward pass computes a passage once for many questions.
    """

    def __init__(self, contexts: Sequence[AskedContext], reader: PassageModel) -> None:
        """reader: the model that cuts the texts into passages."""
        self.texts: list[Text] = []
        self.ids: list[list[int]] = []  # of each passage
        self._plain: list[str] = []  # its words, with spaces around each
        self._owner: list[Text] = []
        self._holding: dict[str, list[int]] = defaultdict(list)  # word -> passages
        self._about: dict[tuple[str, str], list[Text]] = defaultdict(list)
        for one in contexts:
            first = len(self.ids)
            for passage in passages_of(reader, [one.context]):
                self.ids.append(passage.ids.tolist())
                words = plain_words(reader.tokenizer.decode(self.ids[-1]))
                self._plain.append(f" {' '.join(words)} ")
                for word in set(words):
                    self._holding[word].append(len(self.ids) - 1)
            tokens = sum(map(len, self.ids[first:]))
            about = one.source, one.title
            text = Text(one.collection, about, range(first, len(self.ids)), tokens)
            self.texts.append(text)
            self._owner += [text] * len(text.passages)
            self._about[about].append(text)
        for number, one in enumerate(contexts):
            self.texts[number].examples += [self._example(number, asked) for asked in one.questions]

    def _example(self, number: int, asked: AskedQuestion) -> Example:
        """The passage that contains an answer verbatim (of several, the one that shares most rare
        words with the question), and one more if it shares two that the first lacks.
        """
        passages = self.texts[number].passages
        wanted = {w for w in plain_words(asked.question) if len(self._holding[w]) <= _POSTINGS}
        answers = [words for one in asked.answers if (words := plain_words(one))]
        verbatim = [f" {' '.join(words)} " for words in answers]
        holding = [at for at in passages if any(one in self._plain[at] for one in verbatim)]
        if not holding:
            return Example(number, asked)
        best = max(holding, key=lambda at: self._shared(wanted, at))
        left = wanted.difference(self._plain[best].split())
        other = max(passages, key=lambda at: self._shared(left, at))
        needed = {best, other} if self._shared(left, other) >= 2 else {best}
        return Example(number, asked, tuple(sorted(needed)), frozenset(holding))

    def _shared(self, words: set[str], passage: int) -> int:
        return len(words.intersection(self._plain[passage].split()))

    def pools(
        self, rng: Random, tokens: int, most: int, unanswerable: float = _UNANSWERABLE
    ) -> Iterator[list[Composed]]:
        """Draw questions of texts with at most `tokens` tokens of passages, without end. A source's
        probability grows with the square root of its size.

        most: passages of an example; unanswerable: share of questions whose answer is left out.
        Raises InvalidInput if all texts are longer.
        """
        sources = {text.collection: list[Text]() for text in self.texts}
        for text in self.texts:
            if text.examples and 0 < text.tokens <= tokens:
                sources[text.collection].append(text)
        if not any(sources.values()):
            problem = f"are all empty or have more than {tokens} tokens; split them"
            raise InvalidInput(f"the texts to learn from, or those held out, {problem}")
        weights = [len(some) ** 0.5 for some in sources.values()]
        while True:
            main = rng.choice(*rng.choices([*sources.values()], weights))
            chosen, size = [main], main.tokens
            for other in self._others(main, rng):
                if size + other.tokens <= tokens:
                    chosen.append(other)
                    size += other.tokens
            asked = [one for text in chosen for one in text.examples]
            rng.shuffle(asked)
            found = [self.compose(one, chosen, most, rng, unanswerable) for one in asked]
            if some := [one for one in found if one.passages]:
                yield some

    def compose(
        self, example: Example, texts: Sequence[Text], most: int, rng: Random, unanswerable: float
    ) -> Composed:
        """An example with at most `most` passages of these texts, texts in random order."""
        asked, own = example.asked, self.texts[example.text].passages
        answerable = bool(asked.answers) and rng.random() >= unanswerable
        count = min(most, rng.choice((1, 2, 4, 8, most)))
        if asked.answers and not answerable:
            needed, apart = set[int](), {*example.right, *example.holding}
        else:
            nearest = min(count, _MOST_OWN) if answerable else 1
            needed = apart = set(example.right) or self._near(asked, own, nearest)
        spare = [at for text in texts for at in text.passages if at not in apart]
        taken = needed.union(rng.sample(spare, min(max(0, count - len(needed)), len(spare))))
        groups = [[at for at in text.passages if at in taken] for text in texts]
        rng.shuffle(groups)
        answer = asked.target if answerable else UNKNOWN
        return Composed([self.ids[at] for group in groups for at in group], asked.question, answer)

    def _near(self, asked: AskedQuestion, passages: range, most: int) -> set[int]:
        """The `most` consecutive passages that share most words with the question."""
        wanted = set(plain_words(asked.question))
        shared = [self._shared(wanted, at) for at in passages]
        starts = range(max(1, len(passages) - most + 1))
        start = max(starts, key=lambda at: sum(shared[at : at + most]))
        return set(passages[start : start + most])

    def _others(self, text: Text, rng: Random) -> list[Text]:
        """Texts to read together with one: up to three with its title, and up to three others with
        passages that share rare words with one of its questions, those with most first.
        """
        same = [one for one in self._about[text.about] if one is not text]
        found = rng.sample(same, min(len(same), rng.randrange(4)))
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(plain_words(rng.choice(text.examples).asked.question)):
            holding = self._holding.get(word, ())
            if 0 < len(holding) <= _POSTINGS:
                for at in holding:
                    scores[at] += math.log(1 + len(self.ids) / len(holding))
        best = sorted(scores, key=lambda at: (-scores[at], at))
        like = [one for at in best if (one := self._owner[at]).about != text.about]
        found += [*dict.fromkeys(like)][: rng.randrange(4)]
        rng.shuffle(found)
        return found
