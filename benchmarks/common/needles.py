"""Needles in book text: the questions that ask for them, and the memories they are hidden in.

A needle is written into a *passage* of some hundred tokens of book text, and every passage is
ingested as a document of its own; books without needles are ingested as *fillers* of several sizes.
A trial attaches its passage among as many fillers as its length asks for, at a random place in
their order, so that one ingest of a passage serves every length. All blocks that are attached
compete in one search, and old blocks are all at the same distance, so this equals one long
document, but for the few blocks on both sides of a needle's passage.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

TASKS = {
    "passkey": "pass key, the paper's words",
    "fact": "one fact, a number",
    "fact_unrelated": "one fact, a number, 200 unrelated tokens before the question",
    "fact_forms": "one fact, a number, in any of training's sentence forms",
    "fact_any": "one fact, any value (words, names, unseen formats)",
    "rephrased": "one fact, a number, sentence and question in unseen forms",
    "of_20": "one of 20 facts of the same form",
    "of_100": "one of 100 facts of the same form",
    "updated": "updated facts, the last value wins",
    "split": "value split across blocks",
}
_SMALL, _LARGE = 1024, 2048  # tokens of the small fillers


@dataclass(frozen=True)
class Question:
    """A question to a memory that holds the documents `passages`. value: the right answer, with the
    space before it.
    """

    task: str
    prompt: str
    value: str
    passages: list[str]
    before: str = ""  # unrelated text that the session reads first
    old: str = ""  # a value that was replaced


@dataclass(frozen=True)
class Plan:
    """What a memory was built with, and what can be asked of it."""

    settings: dict[str, Any]
    fillers: list[tuple[str, int]]  # name, tokens
    tokens: dict[str, int]  # of each passage
    questions: list[Question] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> "Plan | None":
        """The plan of an earlier build; None if there is none."""
        path = directory / "plan.json"
        if not path.exists():
            return None
        values = json.loads(path.read_text())
        questions = [Question(**question) for question in values.pop("questions")]
        fillers = [(name, tokens) for name, tokens in values.pop("fillers")]
        return cls(**values, fillers=fillers, questions=questions)

    def save(self, directory: Path) -> None:
        """Write plan.json, last: its presence says that the memory is whole."""
        (directory / "plan.json").write_text(json.dumps(asdict(self)))

    def of(self, task: str) -> list[Question]:
        """The questions of a task."""
        return [question for question in self.questions if question.task == task]

    def documents(self, question: Question, length: int, rng: Random) -> list[str] | None:
        """The documents of one trial, in order; None if the passages alone are longer than
        `length`.
        """
        room = length - sum(self.tokens[name] for name in question.passages)
        if room < -_SMALL // 2:
            return None
        chosen: list[str] = []
        left = sum(tokens for _, tokens in self.fillers)
        if room > left + _SMALL // 2:
            raise ValueError(
                f"the fillers of this memory do not reach {length:,} tokens; build it with longer "
                "ones"
            )
        for size in sorted({tokens for _, tokens in self.fillers}, reverse=True):
            same = [name for name, tokens in self.fillers if tokens == size]
            left -= size * len(same)
            needed = -(-(room - left) // size) if left else round(room / size)
            # as few large ones as will do: small ones make more orders
            count = max(0, min(needed, len(same)))
            chosen += rng.sample(same, count)
            room -= count * size
        rng.shuffle(chosen)
        for name in question.passages:
            chosen.insert(rng.randint(0, len(chosen)), name)
        return chosen


def filler_sizes(longest: int) -> list[int]:
    """Tokens of the filler documents that reach every length up to `longest`."""
    sizes = [_SMALL] * 4
    if longest > 2 * _LARGE:
        sizes += [_LARGE] * (31 if longest >= 16 * _LARGE else longest // _LARGE)
    for size, most in ((24 * 1024, 8), (112 * 1024, 1 << 20)):
        missing = longest - sum(sizes)
        if missing > 0:
            sizes += [size] * min(-(-missing // size) + 3, most)
    return sizes
