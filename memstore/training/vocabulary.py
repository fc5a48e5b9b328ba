"""The words that planted facts are made of, read from the text files in `words/`.

forms.txt has sentence forms and the words of landmark training (`facts.py`); word_pools.txt and
relations.txt have what is asked for in other words than it is stated in (`planted.py`). A word, a
name and a relation belong to one split; so does a pair of synonyms, by its first word. No word is
in two pairs.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from memstore.training.corpus import is_held_out

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
T = TypeVar("T", str, tuple[str, str])


class Relation(NamedTuple):
    """One relation: its statements and questions share no word of weight but the subject.

    subjects: kinds of subject that it suits, letters of "tpb" (things, places, beings). value: a
    kind of value that `planted.py` draws. In a statement or question {E} is the subject and {v} the
    value; after `|` of a question are the words that begin its answer.
    """

    subjects: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@cache
def pool(name: str) -> tuple[str, ...]:
    """The words of a section of word_pools.txt."""
    return between_commas(sections("word_pools")[name])


@cache
def pairs(name: str) -> tuple[tuple[str, str], ...]:
    """The pairs of a word and its synonym of a section of word_pools.txt."""
    return tuple((one, other) for one, _, other in (word.partition("/") for word in pool(name)))


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


def of_split(names: Iterable[T], split: Split) -> tuple[T, ...]:
    """Those of the names or pairs that belong to a split."""
    held_out = split == "held_out"
    return tuple(x for x in names if is_held_out(x if isinstance(x, str) else x[0]) == held_out)


@cache
def sections(file: str) -> dict[str, str]:
    """The text below each "[NAME]" of a file."""
    parts = (part.partition("]") for part in _read(file).split("[")[1:])
    return {name: text.strip() for name, _, text in parts}


def between_commas(text: str) -> tuple[str, ...]:
    """The words of a section."""
    return tuple(" ".join(word.split()) for word in text.split(","))


def forms(text: str) -> tuple[str, ...]:
    """The sentence forms of a section, one a line; \\n is a new line."""
    return tuple(line.replace("\\n", "\n") for line in text.splitlines())


def _read(name: str) -> str:
    return (Path(__file__).parent / "words" / f"{name}.txt").read_text(encoding="utf-8")
