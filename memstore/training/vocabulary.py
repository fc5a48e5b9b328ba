"""The words that planted facts are made of, read from the text files in `words/`.

recall.txt has the sentence forms and words of landmark training (`facts.py`), the others those of
selectors: sentence forms, pools of words, and relations, which are facts asked for in other words
than they are stated in. A word is in one pair of synonyms only, so that a pair is wholly of one
split (`questions.split`).
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

Words = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]
PAIRS = ("THINGS", "PLACES", "BEINGS", "QUALITIES", "OTHERS")
"""The sections of word_pools.txt that hold pairs of synonyms."""


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
def pool(name: str) -> Words:
    """The words of a section of word_pools.txt."""
    return between_commas(sections("word_pools")[name])


@cache
def pairs(name: str) -> Pairs:
    """The pairs of a word and its synonym of a section of word_pools.txt."""
    return tuple((one, other) for one, _, other in (word.partition("/") for word in pool(name)))


def all_pairs() -> Pairs:
    """All pairs of synonyms."""
    return tuple(pair for name in PAIRS for pair in pairs(name))


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


@cache
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
