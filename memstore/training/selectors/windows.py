"""Windows of prose with facts planted in them, and the questions for them: what selectors learn
from and are measured with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from memstore.disk.format.text_parts import Passage
from memstore.errors import InvalidInput
from memstore.model.adapter import TextTokenizer
from memstore.training.selectors.questions import Fact, Facts, Split, Subject

Cut = Callable[[str], Sequence[Passage]]
"""A text as the passages that a memory would make of it."""

_CHARACTERS = 4400  # of a window: about 1,024 tokens
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")
_LEADS = ("", "", "", "\n\n", "Question: ", "Please answer from what you have read. ")
# How many questions of a kind a window gets, on the mean.
_LITERAL, _KEYS, _REWORDED, _SYNONYMS = 2.0, 0.6, 4.0, 6.5
_OTHERWISE = 2.0  # literal but for the subject, which is asked for by synonyms
_PASSAGES, _ABSENT = 3, 3
_LIKE = 0.45  # facts of the attribute or the subject of another one of the last windows
_BEGUN = 0.15  # of the questions come with the words that begin their answer


@dataclass(frozen=True)
class Question:
    """A question as it is read, and where its answer stands.

    kind: of the fact, "asked" (by people), "plain" (text that goes on, nothing is asked) or
    "absent" (a question that no window answers). lead: ids read before the user's words; ids: of
    the user's words; text: these words. key: as in Fact. passage: the window's passage where the
    value begins, -1 if none; touched: all passages that the fact reaches into, or that hold the
    answer.
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
    """A text, the ids of its passages, and the questions for them. source: of people's questions,
    the collection that the text is from; "" for prose with facts planted in it.
    """

    text: str
    passages: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    source: str = ""


def firsts(windows: Sequence[Window]) -> list[int]:
    """Of each window the number of its first passage, those of all windows counted on."""
    return [0, *accumulate(len(window.passages) for window in windows)][: len(windows)]


class WindowWriter:
    """Writes windows of one split from texts, the same ones for the same seed. cut: as a memory
    does.

    Raises InvalidInput if no text is long enough.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: TextTokenizer, cut: Cut, wanted: Split, seed: int
    ) -> None:
        self.rng = Random(f"windows {wanted} {seed}")
        self.facts = Facts(wanted, self.rng)
        self._texts = [text for text in texts if len(text) > 2 * _CHARACTERS]
        if not self._texts:
            raise InvalidInput(f"no text has {2 * _CHARACTERS:,} characters; give longer ones")
        self._tokenizer, self._cut = tokenizer, cut
        self._subjects: list[Subject] = []
        self._attributes: list[str] = []

    def windows(self, count: int) -> Iterator[Window]:
        """`count` windows."""
        for _ in range(count):
            yield self.window()

    def window(self, planted: Sequence[Fact] = ()) -> Window:
        """One window with these facts and as many others as usual."""
        facts = [*planted, *self._draw()]
        self.rng.shuffle(facts)
        text, starts = self._plant(facts)
        passages = self._cut(text)
        questions = [
            self._ask(fact, start, passages) for fact, start in zip(facts, starts, strict=True)
        ]
        questions += self._passages(text, passages)
        questions.append(self._plain())
        questions += [self._absent() for _ in range(_ABSENT)]
        ids = tuple(tuple(passage.ids.tolist()) for passage in passages)
        return Window(text, ids, tuple(questions))

    def prose_with(self, sentences: Sequence[str], characters: int) -> str:
        """About so many characters of prose with these sentences between its own, in this order."""
        prose = self._prose()[:characters]
        ends = [match.end() for match in _SENTENCE_END.finditer(prose)] or [len(prose)]
        parts, last = [], 0
        for end, sentence in zip(sorted(self.rng.choices(ends, k=len(sentences))), sentences):
            parts += [prose[last:end], " ", sentence]
            last = end
        return "".join([*parts, prose[last : ends[-1]]])

    def _draw(self) -> list[Fact]:
        rng, facts = self.rng, self.facts

        def some(mean: float) -> int:
            return int(mean) + (rng.random() < mean % 1)

        found = [self._literal() for _ in range(some(_LITERAL))]
        found += [facts.literal(otherwise=True) for _ in range(some(_OTHERWISE))]
        found += [facts.key() for _ in range(some(_KEYS))]
        for synonyms, mean in ((False, _REWORDED), (True, _SYNONYMS)):
            for _ in range(some(mean)):
                if self._subjects and rng.random() < _LIKE:
                    subject = rng.choice(self._subjects)
                else:
                    subject = facts.subject(named=0.0 if synonyms else 0.25)
                    self._subjects = [*self._subjects[-11:], subject]
                asked_otherwise = synonyms and bool(subject.otherwise)
                found.append(facts.reworded(subject, synonyms=asked_otherwise))
        return found

    def _literal(self) -> Fact:
        again = self._attributes and self.rng.random() < _LIKE
        fact = self.facts.literal(self.rng.choice(self._attributes) if again else None)
        self._attributes = [*self._attributes[-7:], fact.key.split("|")[0]]
        return fact

    def _prose(self) -> str:
        text = self.rng.choice(self._texts)
        start = self.rng.randrange(len(text) - 2 * _CHARACTERS)
        after = _SENTENCE_END.search(text, start, start + _CHARACTERS // 4)
        start = after.end() if after else start
        return text[start : start + _CHARACTERS].replace("\r", "").lstrip()

    def _plant(self, facts: Sequence[Fact]) -> tuple[str, list[int]]:
        """Prose with the facts after some of its sentences (one in five: after any word), and where
        each begins.
        """
        prose = self._prose()[: _CHARACTERS - sum(len(fact.sentence) + 1 for fact in facts)]
        ends = [match.end() for match in _SENTENCE_END.finditer(prose)]
        prose = prose[: ends[-1]] if ends else prose
        words = [match.start() for match in re.finditer(r"(?<=[a-z]) ", prose)]
        chosen: set[int] = set()
        while len(chosen) < len(facts):
            rare = self.rng.random() < 0.2 or len(ends) < 2 * len(facts)
            chosen.add(self.rng.choice(words if rare else ends))
        parts, starts, last, length = [], [], 0, 0
        for at, fact in zip(sorted(chosen), facts, strict=True):
            parts += [prose[last:at], " ", fact.sentence]
            starts.append(length + at - last + 1)
            length, last = starts[-1] + len(fact.sentence), at
        return "".join([*parts, prose[last:]]), starts

    def _ask(self, fact: Fact, start: int, passages: Sequence[Passage]) -> Question:
        end = start + len(fact.sentence)
        value = start + max(0, fact.sentence.rfind(fact.value))
        touched = [n for n, one in enumerate(passages) if one.start < end and one.end > start]
        right = next(n for n in touched if passages[n].end > value)
        asked = fact.question + (f" {fact.begun}" if self.rng.random() < _BEGUN else "")
        return self._question(fact.kind, asked, fact.key, right, tuple(touched))

    def _question(
        self, kind: str, text: str, key: str = "", passage: int = -1, touched: tuple[int, ...] = ()
    ) -> Question:
        lead = self.rng.choice(_LEADS)
        ids = self._tokenizer.encode(lead + text)
        ends = accumulate(max(1, self._tokenizer.characters([token])) for token in ids)
        first = next(n for n, end in enumerate(ends) if end > len(lead))
        return Question(kind, tuple(ids[:first]), tuple(ids[first:]), text, key, passage, touched)

    def _passages(self, text: str, passages: Sequence[Passage]) -> list[Question]:
        found = []
        for number in self.rng.sample(range(len(passages)), _PASSAGES):
            one = passages[number]
            asked = self.facts.passage(text[one.start : one.end])
            if asked is not None:
                found.append(self._question("passage", asked, "", number, (number,)))
        return found

    def _plain(self) -> Question:
        return self._question("plain", self._prose()[: self.rng.randrange(80, 200)].strip() or ".")

    def _absent(self) -> Question:
        """The question of a fact that is planted nowhere."""
        kind = self.rng.randrange(3)
        fact = self.facts.literal() if kind == 0 else self.facts.reworded(synonyms=kind == 1)
        return self._question("absent", fact.question, fact.key)
