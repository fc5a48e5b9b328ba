"""Ways of answering a question about documents, behind one call; and asking many questions by each,
so that a run that was killed goes on.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from benchmarks.real.baselines import Chooser, Fused, Right, Sentences, Words, minilm
from benchmarks.real.blocks import Blocks
from benchmarks.real.plan import Question
from benchmarks.real.prompting import Prompted
from benchmarks.real.results import Results, Row
from benchmarks.real.tuning import Tuned
from memstore.model.lookup_settings import LookupSettings

METHODS = {
    "memory": "the memory as its reader asks it",
    "memory@K": "the same with its best K blocks",
    "memory-right": "the same with the right blocks (ceiling)",
    "memory-text": "the blocks that the memory chose, as text in the prompt (ceiling)",
    "right": "the right blocks as text in the prompt (ceiling)",
    "full": "the documents whole in the prompt",
    "bm25@K": "the best K blocks by BM25, in the prompt",
    "minilm@K": "the best K by all-MiniLM-L6-v2, in the prompt",
    "rrf@K": "the best K by both, fused by reciprocal rank, in the prompt",
    "bm25, minilm, rrf": "with the K and the threshold of --tuned",
    "bm25~, minilm~, rrf~": "as many as the memory's own rule would read",
    "none": "the question alone",
}

BASELINES = ("bm25", "minilm", "rrf")
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

    score_range: of these only those within so many standard deviations of all scores below the best
    one, as a memory reads. threshold: says nothing where the best score is below it.
    """

    def __init__(
        self,
        prompted: Prompted,
        blocks: Blocks,
        chooser: Chooser,
        k: int | None,
        *,
        score_range: float | None = None,
        threshold: float | None = None,
    ) -> None:
        self.prompted, self.blocks, self.chooser, self.k = prompted, blocks, chooser, k
        self.score_range, self.threshold = score_range, threshold

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        rows: list[Row] = []
        asked: list[tuple[Question, list[str]]] = []
        for question in questions:
            scores = self.chooser.scores(question)
            scope = self.blocks.scope(question.documents)
            row: Row = {"right": 0.0, "said": "", "read": []}
            row |= standing(scores, scope, self.blocks, question)
            row["answered"] = self.threshold is None or row["best"] >= self.threshold
            if row["answered"]:
                row["read"] = [scope[at] for at in self._choose(scores)]
                asked.append((question, self.blocks.texts(row["read"])))
            rows.append(row)
        answers = iter(self.prompted.answers(asked))
        return [row | (next(answers)._asdict() if row["answered"] else {}) for row in rows]

    def _choose(self, scores: np.ndarray) -> list[int]:
        """Numbers of blocks, in the order of the text."""
        best = best_first(scores)[: int((scores > 0).sum()) if self.k is None else self.k]
        if self.score_range is not None:
            best = best[scores[best] >= scores.max() - self.score_range * scores.std()]
        found: list[int] = sorted(best.tolist())
        return found


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


class Baselines:
    """The methods without a memory by name, each made when it is first needed."""

    def __init__(
        self,
        model: Path | str,
        dtype: str,
        blocks: Blocks,
        work: Path,
        *,
        tuned: Mapping[str, Tuned] | None = None,
        lookup: LookupSettings | None = None,
    ) -> None:
        """tuned: what is read by "bm25" and its like; lookup: the memory's rule, for "bm25~"."""
        self.blocks, self.work, self.tuned, self.lookup = blocks, work, tuned or {}, lookup
        self.prompted: Callable[[], Prompted] = cache(lambda: Prompted(model, dtype))
        self._chooser: Callable[[str], Chooser] = cache(self._make)

    def method(self, name: str) -> Method:
        """A method by its name in METHODS. Raises SystemExit for an unknown one."""
        kind, _, number = name.partition("@")
        if kind == "none":
            return Nothing(self.prompted())
        if kind == "full":
            return Whole(self.prompted(), self.blocks.documents)
        kind = kind.removesuffix("~")
        if kind not in (*BASELINES, "right") or name not in (kind, f"{kind}~", f"{kind}@{number}"):
            raise SystemExit(f"no method {name!r}; choose of {', '.join(METHODS)}")
        how: dict[str, Any] = {"k": int(number) if number.isdigit() else None}
        if name.endswith("~"):
            assert self.lookup is not None
            how = {"k": self.lookup.top_k, "score_range": self.lookup.score_range}
        elif name in BASELINES:
            if name not in self.tuned:
                raise SystemExit(f"{name} is not tuned; give --tuned, which --tune of a run writes")
            how = {"k": self.tuned[name].k, "threshold": self.tuned[name].threshold}
        elif how["k"] is None and kind in BASELINES:
            raise SystemExit(f"no number in {name!r}; {kind}@4 reads the best four")
        return Retrieval(self.prompted(), self.blocks, self._chooser(kind), **how)

    def _make(self, kind: str) -> Chooser:
        if kind == "right":
            return Right(self.blocks)
        if kind == "bm25":
            return Words(self.blocks)
        if kind == "minilm":
            return Sentences(self.blocks, minilm(self.work))
        return Fused([self._chooser(one) for one in ("bm25", "minilm")])


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
