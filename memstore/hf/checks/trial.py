"""What of a model is a program in all but name, tried by a child process within bounds on memory
and processor time: its tokenizer, and its chat template.
"""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from memstore.child import python_command
from memstore.decode import unpack
from memstore.errors import InvalidWeights, MemstoreError

TOO_MUCH = 77  # how a child ends that has no memory left
SECONDS = {"tokenizer": 60, "template": 10}  # of processor time
MEMORY = {"tokenizer": 4 << 30, "template": 1 << 30}  # bytes
MOST_TEMPLATE = 1 << 20  # characters
MOST_RENDERED = 1 << 18


class Asked(msgspec.Struct):
    """What a child is asked to try: a tokenizer's file, or a template with what it may name."""

    tokenizer: str = ""
    template: str = ""
    messages: list[dict[str, str]] = []
    tokens: dict[str, str] = {}
    date: str = ""


class Told(msgspec.Struct):
    """What a child says: what a template writes, what it raised instead, or why there is
    nothing.
    """

    text: str = ""
    raised: str = ""
    refused: str = ""


class Trial:
    """A tokenizer's file in its child; `check` waits for what comes of it."""

    passed = f"tried by tokenizers {metadata.version('tokenizers')}"
    """What is remembered of one that may be loaded."""

    def __init__(self, path: Path) -> None:
        """Raises MemstoreError."""
        self.path = path
        self._child = _begin("tokenizer")
        self._asked = Asked(tokenizer=str(path))

    def check(self, name: str | Path) -> None:
        """Raises InvalidWeights for a tokenizer that is none, or not within bounds."""
        told = _told(self._child, self._asked)
        if told is None:
            raise InvalidWeights(
                f"{name}: its {self.path.name} needs too much time or memory to be loaded; get "
                "the model's files again"
            )
        if told.refused:
            raise InvalidWeights(f"{name}: its {self.path.name} {told.refused}")

    def end(self) -> None:
        """Whatever it does."""
        self._child.kill()
        self._child.communicate()


@contextmanager
def trying(path: Path | None) -> Iterator[Trial | None]:
    """A trial of a tokenizer's file, while something else is done; None where there is none."""
    if path is None:
        yield None
        return
    trial = Trial(path)
    try:
        yield trial
    finally:
        trial.end()


def rendered(
    template: str, messages: list[dict[str, str]], tokens: Mapping[str, str], date: str
) -> str:
    """What a chat template writes for a conversation and the beginning of an answer, on any day
    `date`. Raises ValueError for one that raises, InvalidWeights for one that takes too much.
    """
    if len(template) > MOST_TEMPLATE:
        raise InvalidWeights(f"the chat template has {len(template):,} characters")
    asked = Asked(template=template, messages=messages, tokens=dict(tokens), date=date)
    return _rendered(msgspec.json.encode(asked))


@lru_cache(maxsize=16)
def _rendered(asked: bytes) -> str:
    told = _told(_begin("template"), msgspec.json.decode(asked, type=Asked))
    if told is None or told.refused:
        raise InvalidWeights(
            "the chat template needs too much time or memory, or writes too much; get the "
            "tokenizer's files again, or remove the template"
        )
    if told.raised:
        raise ValueError(told.raised)
    return told.text


def _begin(what: Literal["tokenizer", "template"]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            python_command(
                "memstore.hf.checks.trial_process", what, str(MEMORY[what]), str(SECONDS[what])
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise MemstoreError(f"no process to try a model's files in did start: {error}") from None


def _told(child: "subprocess.Popen[bytes]", asked: Asked) -> Told | None:
    """What a child says; None for one that took too much."""
    said, complaints = child.communicate(msgspec.json.encode(asked))
    if child.returncode < 0 or child.returncode == TOO_MUCH:
        return None
    if child.returncode:
        last = complaints.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MemstoreError(f"the process to try a model's files in did not start: {last}")
    try:
        return unpack(said, Told)
    except ValueError:
        return None
