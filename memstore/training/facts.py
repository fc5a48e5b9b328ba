"""Planted facts: invented things with attributes and values, and sentences that state, update and
ask for them. facts.txt has the words and the sentence forms.

Landmark training and the benchmarks of landmark models plant these facts. Of every pool of words
and list of sentence forms, training never sees the part for the split "held_out".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
_PARTS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("[")[1:]
_SECTIONS = {name: text.strip() for name, _, text in (part.partition("]") for part in _PARTS)}


def _forms(name: str) -> dict[Split, tuple[str, ...]]:
    """Sentence forms, one a line; \\n is a new line."""
    lines = {split: _SECTIONS[f"{name} {split}"].splitlines() for split in SPLITS}
    return {split: tuple(x.replace("\\n", "\n") for x in lines[split]) for split in SPLITS}


def _between_commas(name: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in _SECTIONS[name].split(","))


def _words(name: str) -> dict[Split, tuple[str, ...]]:
    return {split: _between_commas(f"{name} {split}") for split in SPLITS}


# In a form: {E} "the red fox" or "Dorvel", {C} the same with a capital, {e} without the article,
# {a} the attribute, {v} the value. A question says everything up to its answer. The first four of
# each list are the plain ones that training may begin with.
STATEMENTS, UPDATES, QUESTIONS, PASS_KEY_STATEMENTS, PASS_KEY_QUESTIONS = map(
    _forms, ("STATEMENTS", "UPDATES", "QUESTIONS", "PASS_KEY_STATEMENTS", "PASS_KEY_QUESTIONS")
)

ValueKind = Literal["digits", "repeats", "words", "name", "code", "format"]
# How often each kind of value is drawn: digits, where a mistake shows, make the most; the formats
# only in evaluation.
VALUE_SHARES: dict[Split, dict[ValueKind, float]] = {
    "train": {"digits": 0.42, "repeats": 0.18, "words": 0.16, "name": 0.08, "code": 0.16},
    "held_out": {"digits": 0.3, "repeats": 0.1, "words": 0.15, "name": 0.1, "format": 0.35},
}
# A: a capital, a: a small letter, d: a digit, anything else itself.
_FORMATS = ("dd-dd-dd", "AAA-dddd")
_LENGTHS, _LENGTH_SHARES = (1, 2, 3, 4, 5, 6, 7), (4, 8, 14, 22, 26, 16, 10)
EntityKind = Literal["colour_noun", "words", "name", "numbered"]
_ENTITY_SHARES: dict[EntityKind, float] = {
    "colour_noun": 0.38,
    "words": 0.32,
    "name": 0.22,
    "numbered": 0.08,
}


_COLOURS, _NOUNS, _ATTRIBUTES = map(_words, ("COLOURS", "NOUNS", "ATTRIBUTES"))
_SYLLABLES = _words("SYLLABLES")
_HELD_OUT_NAME = re.compile(f"(?:{'|'.join(_SYLLABLES['held_out'])})+")
# Of training's names, more than a list of syllables gives: from few, the model learns those instead
# of copying.
_ONSETS = _between_commas("ONSETS")
_CODAS = ("", "", "", *"nrlstmkd")


@dataclass(frozen=True)
class Pools:
    """Words that facts are made of; facts from few words of a kind are easy to confuse."""

    split: Split = "train"
    colours: tuple[str, ...] = ()
    nouns: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), repr=False)  # of the split; a corpus has thousands
    simple: bool = False  # names of a colour and a noun or of words, values of digits or words
    # numbers of few different digits: the first ones give the others away, so they teach little at
    # first
    repeats: float = 0.3
    entity_kind: EntityKind | None = None  # one kind of name for all, where it is narrowed to one

    @classmethod
    def of(
        cls, split: Split, words: Sequence[str] = (), simple: bool = False, repeats: float = 0.3
    ) -> Pools:
        """All colours, nouns and attributes of a split.

        words: words of a corpus, from the same split; default: the split's nouns. simple, repeats:
        see the fields.
        """
        words = tuple(words) or _NOUNS[split]
        return cls(
            split, _COLOURS[split], _NOUNS[split], _ATTRIBUTES[split], words, simple, repeats
        )

    def narrowed(self, rng: Random) -> Pools:
        """A few words of each kind, often one attribute and one kind of name."""
        kinds = tuple(_ENTITY_SHARES)
        colours = self.words if rng.random() < 0.5 else self.colours
        nouns = self.words if rng.random() < 0.6 else self.nouns
        attributes = self.attributes
        if rng.random() < 0.6:  # any words: from a list of attributes a model learns the list
            attributes = tuple(
                " ".join(rng.sample(self.words, rng.choice((1, 1, 2)))) for _ in range(8)
            )

        def some(words: Sequence[str], *counts: int) -> tuple[str, ...]:
            return tuple(rng.sample(words, min(rng.choice(counts), len(words))))

        return replace(
            self,
            colours=some(colours, 2, 4, 8, 25),
            nouns=some(nouns, 4, 8, 16, 40),
            attributes=some(attributes, 1, 1, 2, 4),
            entity_kind=rng.choice(kinds) if rng.random() < 0.6 else None,
        )


def draw_entity(rng: Random, pools: Pools, kind: EntityKind | None = None) -> str:
    """A name: lower case for a thing ("red fox"), capitals for a proper name ("Dorvel")."""
    kind = kind or pools.entity_kind
    if kind is None:
        kinds = list(_ENTITY_SHARES)[: 2 if pools.simple else None]
        kind = rng.choices(kinds, [_ENTITY_SHARES[name] for name in kinds])[0]
    if kind == "colour_noun":
        return f"{rng.choice(pools.colours)} {rng.choice(pools.nouns)}"
    if kind == "words":
        return " ".join(rng.choice(pools.words) for _ in range(rng.choice((1, 2, 2, 3))))
    if kind == "name":
        title = (
            rng.choice(("Captain ", "Mr. ", "Mrs. ", "Doctor ", "Lady "))
            if rng.random() < 0.15
            else ""
        )
        return title + _name(rng, pools.split)
    return f"{rng.choice(pools.nouns)} {rng.randint(1, 99)}"


def draw_value(rng: Random, pools: Pools, kind: ValueKind | None = None) -> str:
    """A value of `kind`, or of one drawn with the split's shares."""
    if kind is None:
        shares = VALUE_SHARES[pools.split]
        kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
        if pools.simple and kind not in ("digits", "repeats", "words"):
            kind = "digits"
        if kind in ("digits", "repeats"):
            kind = "repeats" if rng.random() < pools.repeats else "digits"
    if kind == "digits":
        value = "".join(rng.choices("0123456789", k=rng.choices(_LENGTHS, _LENGTH_SHARES)[0]))
        return value if rng.random() < 0.1 else value.lstrip("0") or "7"
    if kind == "repeats":
        return repeated_digits(rng)
    if kind == "words":
        return " ".join(rng.choice(pools.words) for _ in range(rng.choice((1, 1, 2))))
    if kind == "name":
        return _name(rng, pools.split)
    return _pattern(rng, _code(rng) if kind == "code" else rng.choice(_FORMATS))


def _name(rng: Random, split: Split) -> str:
    wide = split == "train" and rng.random() < 0.8

    def one() -> str:
        while True:
            syllables = [
                rng.choice(_ONSETS) + rng.choice("aeiou") + rng.choice(_CODAS)
                if wide
                else rng.choice(_SYLLABLES[split])
                for _ in range(rng.randint(2, 3))
            ]
            word = "".join(syllables)
            if split == "held_out" or not _HELD_OUT_NAME.fullmatch(word):
                return word.capitalize()

    return one() if rng.random() < 0.4 else f"{one()} {one()}"


def repeated_digits(rng: Random) -> str:
    """A number of one to three different digits. Models usually err by copying a repeated digit
    once too often or too rarely.
    """
    digits = "".join(rng.sample("0123456789", rng.choice((1, 2, 2, 3))))
    return "".join(rng.choices(digits, k=rng.choice((3, 4, 5, 5, 5, 6)))).lstrip("0") or "7"


def _code(rng: Random) -> str:
    """The pattern of a code: two or three groups of similar symbols, joined or apart, but no
    held-out format.
    """
    while True:
        groups = [rng.choice("AAadd") * rng.randint(1, 4) for _ in range(rng.choice((2, 2, 3)))]
        pattern = rng.choice(("", "", "-", "-", ".", "/")).join(groups)
        if 3 <= len(pattern) <= 9 and pattern not in _FORMATS:
            return pattern


def _pattern(rng: Random, pattern: str) -> str:
    kinds = {"A": "ABCDEFGHJKLMNPQRSTUVWXYZ", "a": "abcdefghjkmnpqrstuvwxyz", "d": "0123456789"}
    return "".join(rng.choice(kinds[symbol]) if symbol in kinds else symbol for symbol in pattern)


PASS_KEY_QUESTION = PASS_KEY_QUESTIONS["train"][0]  # the paper's
PASS_KEY_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)


@dataclass(frozen=True)
class Fact:
    """One fact; a pass key has no entity."""

    entity: str
    attribute: str
    value: str

    @property
    def is_pass_key(self) -> bool:
        return not self.entity


@dataclass(frozen=True)
class Sentence:
    """Text in parts, each with a flag: is it the value? A value includes the space before it."""

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def prompt(self) -> str:
        """A question's text up to its answer."""
        return self.parts[0][0]

    @property
    def answer(self) -> str:
        """A question's answer, with the space before it."""
        return self.parts[1][0]


def draw_fact(
    rng: Random, pools: Pools, kind: ValueKind | None = None, entity_kind: EntityKind | None = None
) -> Fact:
    """An invented entity, an attribute and a value of `kind` (drawn when None)."""
    entity = draw_entity(rng, pools, entity_kind)
    return Fact(entity, rng.choice(pools.attributes), draw_value(rng, pools, kind))


def pass_key(value: str) -> Fact:
    """A pass key as a fact."""
    return Fact("", "pass key", value)


def draw_pass_key(rng: Random, repeats: float = 0.3) -> Fact:
    """A pass key: 1 to 99,999 as in the paper, often with five digits, a share of `repeats` with
    repeated ones.
    """
    if rng.random() < repeats:
        value = repeated_digits(rng)
    else:
        value = str(rng.randint(1, 99_999) if rng.random() < 0.4 else rng.randint(10_000, 99_999))
    return pass_key(value)


def named(entity: str) -> str:
    """An entity as written in a sentence: proper names take no article."""
    return entity if entity[:1].isupper() else f"the {entity}"


def filled(form: str, fact: Fact) -> str:
    """The text of a fact in a form without a value."""
    name = named(fact.entity)
    words = {"E": name, "C": name[:1].upper() + name[1:], "e": fact.entity, "a": fact.attribute}
    return form.format_map(words)


def sentence(form: str, fact: Fact) -> Sentence:
    """The sentence of a fact in a form of STATEMENTS, UPDATES or PASS_KEY_STATEMENTS."""
    parts: list[tuple[str, bool]] = []
    *before, last = form.split("{v}")
    for text in before:
        text = filled(text, fact)
        if text.rstrip(" "):
            parts.append((text.removesuffix(" "), False))
        parts.append((" " + fact.value if text.endswith(" ") else fact.value, True))
    if last:
        parts.append((filled(last, fact), False))
    return Sentence(tuple(parts))


def question(form: str, fact: Fact) -> Sentence:
    """A question with its answer, in a form of QUESTIONS or PASS_KEY_QUESTIONS; its parts are the
    prompt, the answer and a full stop.
    """
    return sentence(form + " {v}.", fact)
