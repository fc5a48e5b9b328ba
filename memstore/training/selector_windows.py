"""Windows of prose with facts planted in them, and the questions for them: what selectors learn
from and are measured with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from memstore.errors import InvalidInput
from memstore.training.selector_questions import Fact, Facts, Split, Subject

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]
"""A text's token ids, and for each the characters [start, end) that it stands for."""

WINDOW = 1024  # tokens
_CHARACTERS = 9 * WINDOW  # of prose taken for a window, more than it holds
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")
_LEADS = ("", "", "", "\n\n", "Question: ", "Please answer from what you have read. ")
_BEGUN = 0.15  # of the questions come with the words that begin their answer


@dataclass(frozen=True)
class Question:
    """A question as it is read, and where its answer stands.

    kind: of the fact, or "plain" (text that goes on, nothing is asked) and "absent" (a question
    that no window answers). lead: ids read before the user's words; ids: of the user's words;
    text: these words. key: as in Fact. block: the window's block where the value begins, -1 if
    none; touched: all blocks that the fact reaches into.
    """

    kind: str
    lead: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    key: str = ""
    block: int = -1
    touched: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """WINDOW ids of prose with facts in it, and the questions for them."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Mix:
    """How many of what a window gets. like: how often a fact is of the same attribute, or the same
    subject, as another one of the last windows.
    """

    literal: float = 1.8
    key: float = 0.5
    reworded: float = 2.1
    synonyms: float = 3.3
    otherwise: float = 1.1  # literal but for the subject, which is asked for by synonyms
    passages: int = 3
    plain: int = 1
    absent: int = 2
    like: float = 0.45


class WindowWriter:
    """Writes windows of one split from texts, the same ones for the same seed.

    Raises InvalidInput if no text is long enough.
    """

    def __init__(
        self,
        texts: Sequence[str],
        encode: Encode,
        wanted: Split,
        seed: int,
        block_size: int = 64,
        mix: Mix | None = None,
    ) -> None:
        self.mix = mix or Mix()
        self.rng = Random(f"windows {wanted} {seed}")
        self.facts = Facts(wanted, self.rng)
        self._texts = [text for text in texts if len(text) > 2 * _CHARACTERS]
        if not self._texts:
            raise InvalidInput(f"no text has {2 * _CHARACTERS:,} characters; give longer ones")
        self._encode = encode
        self.block_size = block_size
        self._subjects: list[Subject] = []
        self._attributes: list[str] = []

    def windows(self, count: int) -> Iterator[Window]:
        """`count` windows."""
        for _ in range(count):
            yield self.window()

    def window(self, planted: Sequence[Fact] = ()) -> Window:
        """One window with these facts and as many others as the mix says."""
        facts = [*planted, *self._draw()]
        self.rng.shuffle(facts)
        while True:
            text, starts = self._plant(facts)
            ids, spans = self._encode(text)
            last = starts[-1] + len(facts[-1].sentence) if facts else 0
            if len(ids) >= WINDOW and last <= spans[WINDOW - 1][1]:
                break
        questions = [
            self._ask(fact, start, spans) for fact, start in zip(facts, starts, strict=True)
        ]
        questions += self._passages(text, spans)
        questions += [self._plain() for _ in range(self.mix.plain)]
        questions += [self._absent() for _ in range(self.mix.absent)]
        return Window(tuple(ids[:WINDOW]), tuple(questions))

    def _draw(self) -> list[Fact]:
        mix, rng, facts = self.mix, self.rng, self.facts

        def some(mean: float) -> int:
            return int(mean) + (rng.random() < mean % 1)

        found = [self._literal() for _ in range(some(mix.literal))]
        found += [facts.literal(otherwise=True) for _ in range(some(mix.otherwise))]
        found += [facts.key() for _ in range(some(mix.key))]
        for synonyms, mean in ((False, mix.reworded), (True, mix.synonyms)):
            for _ in range(some(mean)):
                if self._subjects and rng.random() < mix.like:
                    subject = rng.choice(self._subjects)
                else:
                    subject = facts.subject(named=0.0 if synonyms else 0.25)
                    self._subjects = [*self._subjects[-11:], subject]
                asked_otherwise = synonyms and bool(subject.otherwise)
                found.append(facts.reworded(subject, synonyms=asked_otherwise))
        return found

    def _literal(self) -> Fact:
        again = self._attributes and self.rng.random() < self.mix.like
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
        each begins. They lie in the first four fifths of what a window may hold.
        """
        prose = self._prose()
        room = int(WINDOW * 3.4) - sum(len(fact.sentence) + 1 for fact in facts)
        ends = [match.end() for match in _SENTENCE_END.finditer(prose, 0, room)]
        words = [match.start() for match in re.finditer(r"(?<=[a-z]) ", prose[:room])]
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

    def _ask(self, fact: Fact, start: int, spans: Sequence[tuple[int, int]]) -> Question:
        at = start + max(0, fact.sentence.rfind(fact.value))
        end = start + len(fact.sentence)
        tokens = [i for i, (low, high) in enumerate(spans) if high > start and low < end]
        value = next(i for i, (_, high) in enumerate(spans) if high > at)
        size = self.block_size
        asked = fact.question + (f" {fact.begun}" if self.rng.random() < _BEGUN else "")
        return self._question(
            fact.kind,
            asked,
            fact.key,
            value // size,
            tuple(range(tokens[0] // size, tokens[-1] // size + 1)),
        )

    def _question(
        self, kind: str, text: str, key: str = "", block: int = -1, touched: tuple[int, ...] = ()
    ) -> Question:
        lead = self.rng.choice(_LEADS)
        ids, spans = self._encode(lead + text)
        first = next(i for i, (_, high) in enumerate(spans) if high > len(lead))
        return Question(kind, tuple(ids[:first]), tuple(ids[first:]), text, key, block, touched)

    def _passages(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Question]:
        found, size = [], self.block_size
        for block in self.rng.sample(range(WINDOW // size), self.mix.passages):
            piece = text[spans[block * size][0] : spans[block * size + size - 1][1]]
            asked = self.facts.passage(piece)
            if asked is not None:
                found.append(self._question("passage", asked, "", block, (block,)))
        return found

    def _plain(self) -> Question:
        return self._question("plain", self._prose()[: self.rng.randrange(80, 200)].strip() or ".")

    def _absent(self) -> Question:
        """The question of a fact that is planted nowhere."""
        kind = self.rng.randrange(3)
        fact = self.facts.literal() if kind == 0 else self.facts.reworded(synonyms=kind == 1)
        return self._question("absent", fact.question)
