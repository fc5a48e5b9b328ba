"""What the models of the paper's tables are measured by: the loss of the same tokens, and what
reading them cost. It is kept beside each model, so that nothing is measured twice.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.reading import AnyModel
from benchmarks.common.intervals import perplexity_ratio
from benchmarks.common.options import named_model, prepare
from benchmarks.common.reading import TARGETS, segments
from benchmarks.common.tables import with_interval
from benchmarks.common.text import Books
from benchmarks.paper.runs import Run, runs_of
from benchmarks.paper.scoring import Scored, Way, score
from memstore.errors import InvalidInput


@dataclass(frozen=True)
class Losses:
    """Mean negative log likelihood of each text [n], and the means of what reading them cost.
    seconds: of a text.
    """

    values: np.ndarray
    attended: float
    state: float
    skipped: float  # share of lookups
    seconds: float

    @property
    def perplexity(self) -> float:
        """Of all texts."""
        return math.exp(self.values.mean())

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"values": self.values.tolist()}


class Measured:
    """What was measured of one model: rows in a file that only grows."""

    def __init__(self, directory: Path, text: Sequence[Path]) -> None:
        """text: files that it reads."""
        self.directory, self.texts = directory, list(text)
        self._file = directory / "measures.jsonl"
        self._found: dict[str, Any] = {}
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # what a killed process was writing
                    continue
                self._found[row["key"]] = row["found"]

    @cached_property
    def model(self) -> AnyModel:
        """The model, loaded when something is measured."""
        return named_model(str(self.directory))

    @cached_property
    def books(self) -> Books:
        """The texts, cut by the tokenizer that all models trained on them share."""
        if not self.texts:
            raise InvalidInput("name texts to measure with: --test, of math --test-math")
        return Books.read(
            [str(path) for path in self.texts], self.model.tokenizer, self.directory / "tokens"
        )

    def kept(self, measure: str, settings: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """What `compute` gives, in plain values, or gave before with the same texts and
        settings.
        """
        files = [[path.name, path.stat().st_size] for path in self.texts]
        key = json.dumps([measure, settings, files], sort_keys=True)
        if key not in self._found:
            found = compute()
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "found": found}) + "\n")
            self._found[key] = found
        return self._found[key]

    def losses(
        self,
        way: Way,
        count: int,
        longest: int,
        *,
        piece: int | None = None,
        reach: int | None = None,
        seed: int = 0,
    ) -> Losses:
        """The losses of `count` texts of `longest` tokens.

        piece: each text is read in pieces of this many tokens, each without the ones before it;
        None = only its last 256 tokens are scored. reach: texts of one reach and seed end with the
        same tokens, whatever their length (None = their length).
        """
        reach = longest if reach is None else reach
        settings = {"way": asdict(way), "count": count, "longest": longest, "piece": piece}
        settings |= {"reach": reach, "seed": seed}

        def compute() -> dict[str, Any]:
            began, values = time.perf_counter(), []
            costs: list[Scored] = []
            for segment in segments(self.books, count, reach - TARGETS, seed):
                text = np.concatenate([segment.before, segment.targets])[-longest:]
                if piece is None:
                    parts = [score(self.model, way, text, longest - TARGETS + 1)]
                else:
                    pieces = [text[at : at + piece] for at in range(0, longest, piece)]
                    parts = [score(self.model, way, ids) for ids in pieces]
                values.append(-float(np.concatenate([part.scores for part in parts]).mean()))
                costs += parts
            lookups = sum(cost.done + cost.skipped for cost in costs)
            return {
                "values": values,
                "attended": float(np.mean([cost.attended for cost in costs])),
                "state": float(np.mean([cost.state for cost in costs])),
                "skipped": sum(cost.skipped for cost in costs) / max(1, lookups),
                "seconds": (time.perf_counter() - began) / count,
            }

        found = dict(self.kept("losses", settings, compute))
        return Losses(np.array(found.pop("values")), **found)


class Bench:
    """The runs of a table, the texts they are measured on, and the seeds of --seeds."""

    def __init__(self, options: argparse.Namespace) -> None:
        prepare(options.threads)
        self.options, self.runs = options, runs_of(options)
        self._tests = {"books": options.test, "math": options.test_math}
        self._measured: dict[Run, Measured] = {}

    def run(self, memory: str = "landmark", **more: Any) -> Run:
        """A run of --preset and --steps."""
        of = self.options
        return Run(memory, preset=of.preset, steps=of.steps, **more)

    def of_seeds(self, run: Run) -> list[Run]:
        """The run with every seed."""
        return [replace(run, seed=seed) for seed in self.options.seeds]

    def train(self, runs: Iterable[Run]) -> None:
        """Train what is not trained yet: of every seed."""
        some = list(runs)
        self.runs.trained([replace(run, seed=n) for n in self.options.seeds for run in some])

    def measured(self, run: Run) -> Measured:
        """What was and will be measured of a run with its one seed."""
        if run not in self._measured:
            self._measured[run] = Measured(self.runs.path(run), self._tests[run.text])
        return self._measured[run]

    def by_seed(
        self,
        run: Run,
        way: Way,
        longest: int,
        *,
        piece: int | None = None,
        reach: int | None = None,
    ) -> list[Losses]:
        """See Measured.losses; of --texts texts, of every seed."""
        print(f"  {run.memory}, {run.text}: {piece or longest} tokens {way}", flush=True)
        count, seed = self.options.texts, self.options.seed
        return [
            self.measured(one).losses(way, count, longest, piece=piece, reach=reach, seed=seed)
            for one in self.of_seeds(run)
        ]

    def losses(self, run: Run, way: Way, longest: int, piece: int | None = None) -> Losses:
        """The same, the mean over seeds."""
        return mean(self.by_seed(run, way, longest, piece=piece))


def mean(every: Sequence[Losses]) -> Losses:
    """Of the same texts, read by several models."""
    costs = ("attended", "state", "skipped", "seconds")
    means = {name: float(np.mean([getattr(one, name) for one in every])) for name in costs}
    return Losses(np.mean([one.values for one in every], 0), **means)


def to(losses: Losses, against: Losses) -> str:
    """The ratio of two perplexities of the same tokens with its interval over texts."""
    return with_interval(perplexity_ratio(losses.values, against.values))
