"""The text of the demonstration: a long real one, with random facts hidden in it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

from memstore.errors import InvalidInput
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.training.recipes.facts import (
    Fact,
    Pools,
    draw_pass_key,
    pass_key_question,
    pass_key_statement,
    question,
    statement,
)

# Things that numbers are given to; two facts may share one, never the thing it belongs to.
_ATTRIBUTES = (
    "code",
    "password",
    "number",
    "pin",
    "token",
    "serial number",
    "access code",
    "id",
    "room number",
)
# Where a sentence or a paragraph has just ended.
_BREAK = re.compile(r"(?<=[.!?])(?: |\n)|\n\n")
_STANDARD_LIBRARY = (
    "argparse",
    "asyncio.base_events",
    "collections",
    "datetime",
    "decimal",
    "doctest",
    "email.message",
    "inspect",
    "logging",
    "pathlib",
    "pickle",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "turtle",
    "typing",
    "unittest.mock",
    "urllib.request",
    "zipfile",
)


class Hidden(NamedTuple):
    """A fact, the sentence that was written into the text, its place there, and the question about
    it.
    """

    fact: Fact
    sentence: str
    place: int  # characters of the text before the sentence
    question: str


def python_text() -> Iterator[str]:
    """Long texts that every Python has: its language reference, then sources of its standard
    library.
    """
    with suppress(ImportError):  # some systems leave it out
        from pydoc_data.topics import topics

        yield "\n".join(topics.values())
    for name in _STANDARD_LIBRARY:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).read_text(encoding="utf-8")


def read_text(path: Path | None) -> Iterator[str]:
    """A file's text; None: Python's own."""
    return python_text() if path is None else Text(path).pieces()


def cut(reader: ModelAPI, pieces: Iterator[str], tokens: int | None) -> str:
    """The beginning of a text, about `tokens` long, to the end of a line."""
    taken: list[str] = []
    left = tokens
    for segment in Tokenizer.segments(pieces):
        if left is not None:
            ids = reader.tokenizer.encode(segment)
            if len(ids) >= left:
                characters = reader.tokenizer.characters(ids[:left])
                taken.append(segment[:characters].rpartition("\n")[0] or segment[:characters])
                break
            left -= len(ids)
        taken.append(segment)
    return "".join(taken)


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """One pass key and count - 1 facts of 4 to 6 digits, about things of which no two share a
    word.
    """
    pools = Pools.of("train")
    things = zip(
        rng.sample(pools.colours, len(pools.colours)), rng.sample(pools.nouns, len(pools.colours))
    )
    facts = [draw_pass_key(rng)]
    for colour, noun in list(things)[: count - 1]:
        digits = "".join(rng.choices("0123456789", k=rng.choice((4, 5, 6))))
        facts.append(Fact(f"{colour} {noun}", rng.choice(_ATTRIBUTES), digits))
    return facts


def hide(rng: Random, text: str, facts: Sequence[Fact]) -> tuple[str, list[Hidden]]:
    """Write each fact as a sentence of its own into a random place between two sentences of the
    text.

    Returns the text with the facts, and what was hidden in the order of `facts`. Raises
    InvalidInput for a short text.
    """
    places = [match.end() for match in _BREAK.finditer(text)]
    if len(places) < len(facts):
        raise InvalidInput(
            f"the text has {len(places)} places between sentences; hiding {len(facts)} facts takes "
            "a longer one"
        )
    chosen = rng.sample(places, len(facts))
    parts: list[str] = []
    hidden: dict[int, Hidden] = {}
    start = length = 0
    for place, number in sorted((place, number) for number, place in enumerate(chosen)):
        fact = facts[number]
        stated = pass_key_statement(fact) if fact.is_pass_key else statement(fact)
        asked = pass_key_question(fact) if fact.is_pass_key else question(fact)
        parts += [text[start:place], stated.text + text[place - 1]]
        length += place - start
        hidden[number] = Hidden(fact, stated.text, length, asked.prompt)
        start = place
        length += len(parts[-1])
    return "".join([*parts, text[start:]]), [hidden[number] for number in range(len(facts))]
