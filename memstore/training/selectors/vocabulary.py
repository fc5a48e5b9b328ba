"""What facts for selectors are made of, read from text files: pools of words (word_pools.txt) and
relations (relations.txt), which are facts asked for in other words than they are stated in.

A word is in one pair of synonyms only, so that a pair is wholly of one split (`questions.split`).
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

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
    """The pools of the file: "[NAME]", then words, or pairs "word/synonym", between commas."""
    pools: dict[str, Words] = {}
    for pool in _read("word_pools.txt").split("[")[1:]:
        name, _, words = pool.partition("]")
        pools[name.lower()] = tuple(" ".join(word.split()) for word in words.split(","))
    pairs = ("things", "places", "beings", "qualities", "others")
    return WordPools(
        *(_pairs(pools[name]) for name in pairs),
        *(pools[name] for name in WordPools._fields if name not in pairs),
    )


@cache
def relations() -> dict[str, Relation]:
    """The relations of the file by name: "@name subjects value: statements => questions"."""
    found = {}
    for entry in " ".join(_read("relations.txt").split()).split("@")[1:]:
        head, _, body = entry.partition(": ")
        name, subjects, value = head.split()
        statements, questions = body.strip().split(" => ")
        found[name] = Relation(
            subjects, value, tuple(statements.split("; ")), tuple(questions.split("; "))
        )
    return found


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _pairs(words: Words) -> Pairs:
    return tuple((one, other) for one, _, other in (word.partition("/") for word in words))
