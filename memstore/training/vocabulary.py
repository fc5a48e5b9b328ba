"""The words that planted facts are made of, read from the text files in `words/`.

recall.txt has the sentence forms and words of landmark training (`facts.py`), the others those of
selectors: sentence forms, pools of words, and relations, which are facts asked for in other words
than they are stated in. A word is in one pair of synonyms only, so that a pair is wholly of one
split (`questions.split`).
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Words = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]


class WordPools(NamedTuple):
    """The pools by name. Pairs: a word and its synonym."""

    things: Pairs
    places: Pairs
    beings: Pairs
    qualities: Pairs
    others: Pairs
    first_names: Words
    last_names: Words
    towns: Words
    colours: Words
    materials: Words
    goods: Words
    number_attributes: Words
    word_attributes: Words
    keys: Words
    languages: Words
    music: Words
    roles: Words
    months: Words

    @property
    def pairs(self) -> Pairs:
        """All pairs of synonyms."""
        return (*self.things, *self.places, *self.beings, *self.qualities, *self.others)


class Relation(NamedTuple):
    """One relation: its statements and questions share no word of weight but the subject.

    subjects: kinds of subject that it suits, letters of "tpb" (things, places, beings). value: a
    kind of value that `Facts.value` draws. In a statement or question {e} is the subject and {v}
    the value; after `|` of a question are the words that begin its answer.
    """

    subjects: str
    value: str
    statements: Words
    questions: Words


@cache
def word_pools() -> WordPools:
    """The pools of word_pools.txt: words, or pairs "word/synonym", between commas."""
    pools = {name.lower(): between_commas(text) for name, text in sections("word_pools").items()}
    pairs = ("things", "places", "beings", "qualities", "others")
    fields: dict[str, Any] = {name: pools[name] for name in WordPools._fields}
    return WordPools(**fields | {name: _pairs(pools[name]) for name in pairs})


@cache
def relations() -> dict[str, Relation]:
    """The relations of relations.txt: "@name subjects value: statements => questions"."""
    found = {}
    for entry in " ".join(_read("relations").split()).split("@")[1:]:
        head, _, body = entry.partition(": ")
        name, subjects, value = head.split()
        statements, questions = body.strip().split(" => ")
        found[name] = Relation(
            subjects, value, tuple(statements.split("; ")), tuple(questions.split("; "))
        )
    return found


def sections(file: str) -> dict[str, str]:
    """The text below each "[NAME]" of a file."""
    parts = (part.partition("]") for part in _read(file).split("[")[1:])
    return {name: text.strip() for name, _, text in parts}


def between_commas(text: str) -> Words:
    """The words of a section."""
    return tuple(" ".join(word.split()) for word in text.split(","))


def forms(text: str) -> Words:
    """The sentence forms of a section, one a line; \\n is a new line."""
    return tuple(line.replace("\\n", "\n") for line in text.splitlines())


def _read(name: str) -> str:
    return (Path(__file__).parent / "words" / f"{name}.txt").read_text(encoding="utf-8")


def _pairs(words: Words) -> Pairs:
    return tuple((one, other) for one, _, other in (word.partition("/") for word in words))
