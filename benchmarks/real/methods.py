"""Ways of answering a question about documents, behind one call; and asking many questions by each,
so that a run that was killed goes on.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from benchmarks.real.blocks import Blocks
from benchmarks.real.plan import Question
from benchmarks.real.prompting import Prompted
from benchmarks.real.results import Results, Row
from benchmarks.real.rivals import Chooser, Right, Sentences, Words, minilm

METHODS = {
    "memory": "the memory as its reader asks it",
    "memory@K": "the same with its best K blocks",
    "memory-right": "the same with the right blocks (ceiling)",
    "right": "the right blocks as text in the prompt (ceiling)",
    "full": "the documents whole in the prompt",
    "bm25@K": "the best K blocks by BM25, in the prompt",
    "minilm@K": "the best K by all-MiniLM-L6-v2, in the prompt",
    "none": "the question alone",
}

TOGETHER = 48  # questions that are asked by one method after the other


class Method(Protocol):
    """Answers questions."""

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        """What came of each: "right" (0..1) and "said", and of a method that chooses blocks what
        `standing` tells, and "read", the blocks.
        """


class Retrieval:
    """Reads the best `k` blocks by a chooser as text in the prompt; None: all with a score above
    zero.
    """

    def __init__(self, prompted: Prompted, blocks: Blocks, chooser: Chooser, k: int | None) -> None:
        self.prompted, self.blocks, self.chooser, self.k = prompted, blocks, chooser, k

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        rows: list[Row] = []
        asked: list[tuple[Question, list[str]]] = []
        for question in questions:
            scores = self.chooser.scores(question)
            scope = self.blocks.scope(question.documents)
            k = int((scores > 0).sum()) if self.k is None else min(self.k, len(scope))
            chosen = [scope[at] for at in sorted(best_first(scores)[:k].tolist())]
            asked.append((question, self.blocks.texts(chosen)))
            rows.append({"read": chosen} | standing(scores, scope, self.blocks, question))
        return [a._asdict() | row for a, row in zip(self.prompted.answers(asked), rows)]


class Whole:
    """Reads everything."""

    def __init__(self, prompted: Prompted, documents: Mapping[str, str]) -> None:
        self.prompted, self.documents = prompted, documents

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        asked = [(q, [self.documents[name] for name in q.documents]) for q in questions]
        return [answered._asdict() for answered in self.prompted.answers(asked)]


class Nothing:
    """Reads the question alone."""

    def __init__(self, prompted: Prompted) -> None:
        self.prompted = prompted

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        answered = self.prompted.answers([(question, []) for question in questions])
        return [one._asdict() for one in answered]


def best_first(scores: np.ndarray) -> np.ndarray:
    """Block numbers by score; the earlier block first where scores are equal."""
    return np.argsort(-scores, kind="stable")


def standing(scores: np.ndarray, scope: list[Any], blocks: Blocks, question: Question) -> Row:
    """Where the blocks stand that a question needs: "rank", how many are preferred to the last
    value's block, "near", how many to the last sentence's first block to be found (None where
    nothing answers); and "best", the best score of all.
    """
    place = {scope[at]: rank for rank, at in enumerate(best_first(scores).tolist())}
    values = [place[block] for block in blocks.values(question)]
    touched = [min(place[block] for block in some) for some in blocks.needed(question)]
    return {
        "rank": max(values, default=None),
        "near": max(touched, default=None),
        "best": float(scores.max(initial=-np.inf)),
    }


class Rivals:
    """The methods without a memory by name, each made when it is first needed."""

    def __init__(
        self, model: Path | str, dtype: str, blocks: Blocks, work: Path, device: str = "cpu"
    ) -> None:
        self.blocks, self.work = blocks, work
        self._prompted: Callable[[], Prompted] = _once(lambda: Prompted(model, dtype, device))
        self._made: dict[str, Any] = {}

    def method(self, name: str) -> Method:
        """A method by its name in METHODS. Raises SystemExit for an unknown one."""
        kind, _, number = name.partition("@")
        if kind == "none":
            return Nothing(self._prompted())
        if kind == "full":
            return Whole(self._prompted(), self.blocks.documents)
        makers: dict[str, Callable[[], Chooser]] = {
            "right": lambda: Right(self.blocks),
            "bm25": lambda: Words(self.blocks),
            "minilm": lambda: Sentences(self.blocks, minilm(self.work)),
        }
        if kind not in makers or (kind != "right") != number.isdigit():
            raise SystemExit(f"no method {name!r}; choose of {', '.join(METHODS)}")
        if kind not in self._made:
            self._made[kind] = makers[kind]()
        return Retrieval(
            self._prompted(), self.blocks, self._made[kind], int(number) if number else None
        )


def ask_all(
    questions: Iterable[Question],
    methods: Mapping[str, Callable[[], Method]],
    results: Results,
    *,
    applies: Callable[[Question, str], bool] = lambda question, method: True,
    seed: int = 0,
) -> None:
    """Ask every question by every method that applies to it, but what `results` has already; in a
    random order, so that a run that is not over says something of every task.
    """
    order = list(questions)
    Random(seed).shuffle(order)
    todo = {
        (at, name): [
            question
            for question in order[at : at + TOGETHER]
            if applies(question, name) and (question.name, name) not in results
        ]
        for at in range(0, len(order), TOGETHER)
        for name in methods
    }
    made: dict[str, Method] = {}
    began, done, total = time.perf_counter(), 0, sum(map(len, todo.values()))
    for (_, name), some in todo.items():
        if not some:
            continue
        if name not in made:
            made[name] = methods[name]()
        at = time.perf_counter()
        rows = made[name].ask(some)
        seconds = round((time.perf_counter() - at) / len(some), 3)
        for question, row in zip(some, rows, strict=True):
            about = {"question": question.name, "task": question.task, "length": question.length}
            results.add(about | {"method": name, "seconds": seconds} | row)
        done += len(some)
        print(f"  {done}/{total} in {time.perf_counter() - began:.0f} s", flush=True)


def _once(make: Callable[[], Prompted]) -> Callable[[], Prompted]:
    made: list[Prompted] = []

    def get() -> Prompted:
        if not made:
            made.append(make())
        return made[0]

    return get
