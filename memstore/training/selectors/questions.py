"""Facts and questions that selectors learn from and are measured with.

Every name (a word, an attribute, a relation, a form) belongs to one split, decided by the name
alone; a pair of synonyms by its first word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from random import Random
from typing import Literal, NamedTuple, TypeVar

from memstore.training.vocabulary import all_pairs, forms, pairs, pool, relations, sections

Split = Literal["train", "validation", "held-out"]
Kind = Literal["literal", "key", "passage", "reworded", "synonyms"]
T = TypeVar("T")

# In a form: {e} the subject ("the old ship", "Nora Quill"), {a} an attribute, {v} the value. After
# `|` of a question are the words that begin its answer. Passages are asked for with some of their
# own words, {x}.
_FORMS = {name: forms(text) for name, text in sections("selector_forms").items()}
STATEMENTS, QUESTIONS = _FORMS["STATEMENTS"], _FORMS["QUESTIONS"]
KEY_STATEMENTS, KEY_QUESTIONS = _FORMS["KEY_STATEMENTS"], _FORMS["KEY_QUESTIONS"]
PASSAGE_QUESTIONS = _FORMS["PASSAGE_QUESTIONS"]
# The section of word_pools.txt that has the values of a kind.
_POOLS = {
    "colour": "COLOURS",
    "town": "TOWNS",
    "material": "MATERIALS",
    "good": "GOODS",
    "language": "LANGUAGES",
    "music": "MUSIC",
    "role": "ROLES",
    "month": "MONTHS",
}
_VALIDATION, _HELD_OUT = 12, 22  # percent of the names
_ONLY_IN_TESTS = frozenset({"pass key", "passkey", "special magic number", "magic number"})


@cache
def _synonyms() -> dict[str, str]:
    return {word: other for pair in all_pairs() for word, other in (pair, pair[::-1])}


@cache
def _first_of_pair() -> dict[str, str]:
    return {word: pair[0] for pair in all_pairs() for word in pair}


def split(name: str) -> Split:
    """The split of a word, attribute, relation or form: the same in every program that asks."""
    if name in _ONLY_IN_TESTS:
        return "held-out"
    digest = hashlib.blake2b(_first_of_pair().get(name, name).encode(), digest_size=4).digest()
    share = int.from_bytes(digest, "big") % 100
    if share < _HELD_OUT:
        return "held-out"
    return "validation" if share < _HELD_OUT + _VALIDATION else "train"


def of_split(names: Iterable[T], wanted: Split) -> tuple[T, ...]:
    """Those names, or pairs by their first word, that are of a split."""
    return tuple(x for x in names if split(x if isinstance(x, str) else x[0]) == wanted)  # type: ignore[index]


class Subject(NamedTuple):
    """What a fact is about: how it is named where it is stated, and by synonyms ("" if none)."""

    name: str
    otherwise: str
    kind: str  # "t", "p", "b": a thing, a place, a being


@dataclass(frozen=True)
class Fact:
    """A sentence to plant and how to ask for it.

    key: what the fact is of, the same for facts that answer the same question. question: the
    user's words; begun: the words that begin its answer; value: what is asked for.
    """

    kind: Kind
    key: str
    sentence: str
    question: str
    begun: str
    value: str


class Facts:
    """Facts of one split, drawn one after another from one random stream."""

    def __init__(self, wanted: Split, rng: Random) -> None:
        self.rng = rng
        self._split: Split = wanted
        kinds = {"t": "THINGS", "p": "PLACES", "b": "BEINGS"}
        self._nouns = {kind: of_split(pairs(name), wanted) for kind, name in kinds.items()}
        self._qualities = of_split(pairs("QUALITIES"), wanted)
        self._first = of_split(pool("FIRST_NAMES"), wanted)
        self._last = of_split(pool("LAST_NAMES"), wanted)
        self._numbers = of_split(pool("NUMBER_ATTRIBUTES"), wanted)
        self._worded = of_split(pool("WORD_ATTRIBUTES"), wanted)
        self._keys = of_split(pool("KEYS"), wanted)
        self._relations = of_split(relations(), wanted)
        self._used: set[str] = set()

    def _form(self, choices: Sequence[str]) -> str:
        """A form of the split; of all, where a short list has none in it."""
        return self.rng.choice(of_split(choices, self._split) or choices)

    def subject(self, kinds: str = "tpb", named: float = 0.0) -> Subject:
        """A subject not drawn before. named: how often a being has a proper name, which has no
        synonyms.
        """
        rng = self.rng
        for attempt in count():
            kind = rng.choice(kinds)
            if kind == "b" and rng.random() < named:
                name, otherwise = self.person(), ""
            else:
                quality, noun = rng.choice(self._qualities), rng.choice(self._nouns[kind])
                side = rng.randrange(2)
                name = f"the {quality[side]} {noun[side]}"
                otherwise = f"the {quality[1 - side]} {noun[1 - side]}"
                if attempt > 9 or (named and kind != "b" and rng.random() < 0.08):
                    by = f" of {self.person()}"  # where the words alone are used up, always
                    name, otherwise = name + by, otherwise + by
            if name not in self._used and otherwise not in self._used:
                break
        self._used |= {name, otherwise} - {""}
        return Subject(name, otherwise, kind)

    def person(self) -> str:
        return f"{self.rng.choice(self._first)} {self.rng.choice(self._last)}"

    def value(self, kind: str) -> str:
        """A value of a kind that relations name."""
        rng = self.rng
        if kind == "person":
            return self.person()
        if kind == "name":
            return rng.choice(self._last)
        if kind == "number":
            return str(rng.randrange(12, rng.choice((99, 990, 990, 9900))))
        if kind == "small":
            return str(rng.randrange(3, 19))
        if kind == "year":
            return str(rng.randrange(1450, 1990))
        if kind == "time":
            return f"{rng.randrange(1, 12)}:{rng.choice(('00', '10', '15', '30', '40', '45'))}"
        named = pool(_POOLS[kind])
        return rng.choice(of_split(named, self._split) or named)

    def literal(self, attribute: str | None = None, *, otherwise: bool = False) -> Fact:
        """A fact asked for in its own words; otherwise: its subject by synonyms."""
        rng = self.rng
        attribute = attribute or rng.choice((*self._numbers, *self._worded))
        value = self._word() if attribute in pool("WORD_ATTRIBUTES") else self._number()
        subject = self.subject(named=0.0 if otherwise else 0.15)
        stated = {"a": attribute, "e": subject.name, "v": value}
        asked = stated | ({"e": subject.otherwise} if otherwise else {})
        question, begun = self._form(QUESTIONS).split("|")
        return Fact(
            "synonyms" if otherwise else "literal",
            f"{attribute}|{subject.name}",
            capital(self._form(STATEMENTS).format(**stated)),
            cased(question.format(**asked), question),
            begun.format(**asked),
            value,
        )

    def key(self) -> Fact:
        """A fact without a subject, like a pass key."""
        attribute = self.rng.choice(self._keys)
        value = self._word() if "word" in attribute else self._number(5)
        question, begun = self._form(KEY_QUESTIONS).split("|")
        stated = {"a": attribute, "v": value}
        return Fact(
            "key",
            attribute,
            capital(self._form(KEY_STATEMENTS).format(**stated)),
            question.format(**stated),
            begun.format(**stated),
            value,
        )

    def reworded(self, subject: Subject | None = None, *, synonyms: bool = False) -> Fact:
        """A fact asked for in other words than it is stated in, its subject too with synonyms.

        subject: one that other facts may be of; its relation is then another one than theirs.
        """
        rng = self.rng
        fitting = [
            name
            for name in self._relations
            if subject is None or subject.kind in relations()[name].subjects
        ]
        rng.shuffle(fitting)
        chosen = fitting[0]
        for name in fitting:
            if subject is None or f"{name}|{subject.name}" not in self._used:
                chosen = name
                break
        relation = relations()[chosen]
        subject = subject or self.subject(relation.subjects, 0.0 if synonyms else 0.25)
        key = f"{chosen}|{subject.name}"
        self._used.add(key)
        value = self.value(relation.value)
        asked = subject.otherwise if synonyms else subject.name
        question, begun = rng.choice(relation.questions).split("|")
        statement = rng.choice(relation.statements)
        return Fact(
            "synonyms" if synonyms else "reworded",
            key,
            capital(statement.format(e=subject.name, v=value)) + ".",
            cased(question.format(e=asked), question),
            begun,
            value,
        )

    def passage(self, text: str) -> str | None:
        """A question for a piece of text in some of its own words, or None if it has too few."""
        rng = self.rng
        found = text.split()[1:-1]
        if len(found) < 8:
            return None
        length = rng.randrange(8, min(len(found), 30) + 1)
        first = rng.randrange(len(found) - length + 1)
        dropped, swapped = rng.uniform(0.15, 0.5), rng.choice((0.0, 0.0, 0.8))
        kept = [
            self._synonym(word) if rng.random() < swapped else word
            for word in found[first : first + length]
            if rng.random() > dropped
        ]
        if len(kept) < 5:
            return None
        asked = " ".join(kept)
        return capital(
            self._form(PASSAGE_QUESTIONS).format(x=asked.lower() if rng.random() < 0.5 else asked)
        )

    def _synonym(self, word: str) -> str:
        other = _synonyms().get(word)
        return other if other is not None and split(word) == self._split else word

    def _number(self, length: int | None = None) -> str:
        length = length or self.rng.choice((2, 3, 4, 4, 5, 6))
        return str(self.rng.randrange(10 ** (length - 1), 10**length))

    def _word(self) -> str:
        kind = self.rng.choice("tpb")
        noun = self.rng.choice(self._nouns[kind])
        return self.rng.choice((self.rng.choice(noun), self.person(), self.rng.choice(self._last)))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def cased(text: str, form: str) -> str:
    """A question with a capital where its form has one."""
    return capital(text) if form[:1].isupper() or form.startswith("{") else text
