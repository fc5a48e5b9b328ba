"""The models that the paper's tables compare: what each is, where it lies, and training it.

Every table takes its models from one directory, --runs: a model that several tables need is trained
once, and a run that was interrupted goes on. One process at a time works in it.

All are trained alike, a number of steps that is the same for every memory. Those of one seed begin
with the same weights, of a decoder without memory that has learned to look up inside a window (from
random weights, landmarks take thousands of steps to learn that), then they are trained by two of
the stages of `memstore train` on the same texts, about the same tokens a step. Steps and no minutes
decide when a run ends, because a busy machine would otherwise give one memory fewer tokens than
another; what a run took is written beside it.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.baselines.config import MEMORIES
from benchmarks.baselines.training import BaselineSubject
from benchmarks.common.options import add, plain_parser
from memstore.disk.files import replacement
from memstore.errors import InvalidInput
from memstore.model.landmark.transformer import PRESETS
from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import TokenCorpus, passages, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.train import Precision, Subject, TrainConfig, train

MAIN = ("landmark", "transformer-xl", "memorizing", "infini", "none")
STEPS = 1000  # of the slowest memory less than half an hour of a core, other cores busy
START = "start"  # the memory of a run that others begin with: none
_START, _WINDOWS = 0.4, 0.2  # of the steps: without memory, and of windows with it
_GOING_ON = 0.5  # of the learning rates of windows, where weights are trained already


@dataclass(frozen=True)
class Run:
    """The training of one model.

    memory: one of MEMORIES, "landmark", or "start", the decoder without memory from which all
    others of its seed start. text: the name of its training text, "books" or "math". steps: the
    steps of its start are included.
    """

    memory: str = "landmark"
    text: str = "books"
    preset: str = "test"
    seed: int = 0
    steps: int = STEPS
    cmt: bool = True

    @property
    def name(self) -> str:
        """Of its directory."""
        more = [] if self.cmt else ["no-cmt"]
        more += [f"{self.steps}-steps", f"seed-{self.seed}"]
        return "-".join([self.memory, self.text, f"preset-{self.preset}", *more])

    @property
    def start(self) -> "Run | None":
        """The run that this one begins with."""
        return None if self.memory == START else replace(self, memory=START)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Plain sentences in windows, then memories: facts, text that goes on, and text alone.

        The middle of the curriculum (varied sentences, no gate yet) and its end are left out: of
        so few steps they would leave too little for the lookup.
        """
        of = {stage.name: stage for stage in default_curriculum()}
        begun, first = (max(1, round(share * self.steps)) for share in (_START, _WINDOWS))
        windows = of["windows"]
        if self.memory == START:
            return (replace(windows, steps=begun),)
        windows = replace(
            windows, steps=first, lr=_GOING_ON * windows.lr, muon_lr=_GOING_ON * windows.muon_lr
        )
        text = of["text"]
        data = replace(text.data, simple=0.7, repeats=0.0, readings=0.25)
        memory = replace(
            text,
            steps=max(1, self.steps - begun - first),
            cmt=self.cmt,
            negative_ramp=0.5,
            data=data,
        )
        return windows, memory


def spent(directory: Path) -> dict[str, Any]:
    """What a run says of itself: finished, and where it was trained the CPU's seconds, tokens and
    the last line of its metrics. Nothing of a run that was not begun.
    """
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads((directory / "run.json").read_text())
        return found
    return {}


class Runs:
    """The runs of a directory."""

    def __init__(
        self, directory: Path, texts: dict[str, Sequence[Path]], precision: Precision = "auto"
    ) -> None:
        """texts: the files of each named text. None are needed if every run is finished."""
        self.directory, self._precision = directory, precision
        self._texts = {name: list(paths) for name, paths in texts.items()}

    def path(self, run: Run) -> Path:
        """Its directory: --model of other commands, once it is finished."""
        return self.directory / run.name

    def finished(self, run: Run) -> bool:
        """Whether it is."""
        return bool(spent(self.path(run)).get("finished"))

    def trained(self, runs: Iterable[Run]) -> list[Path]:
        """The directories of runs, each trained now if it is not finished. Raises InvalidInput
        for a run that was begun otherwise, or whose texts are not named.
        """
        runs = list(runs)
        for run in runs:
            for one in (run.start, run):
                if one is not None and not self.finished(run) and not self.finished(one):
                    self._train(one)
        return [self.path(run) for run in runs]

    def _train(self, run: Run) -> None:
        out = self.path(run)
        out.mkdir(parents=True, exist_ok=True)
        texts = self._prepared(run, out)
        said = spent(out)
        wanted = {"run": asdict(run), "texts": [[p.name, p.stat().st_size] for p in texts]}
        if {name: said[name] for name in wanted if name in said} not in ({}, wanted):
            raise InvalidInput(
                f"{out} was begun with other texts or settings; name those, or another --runs"
            )
        resume = (out / "state.pt").is_file()
        print(f"{run.name}: {'going on' if resume else 'begins'}", flush=True)
        config = TrainConfig(
            out=out,
            model=replace(PRESETS[run.preset], cmt=run.cmt),
            stages=run.stages,
            init=None if run.start is None else self.path(run.start),
            tokenizer=out / "tokens" / "tokenizer.json",
            log_every=math.gcd(20, *(stage.steps for stage in run.stages)),
            seed=run.seed,
            precision=self._precision,
        )
        memory = MEMORIES.get("none" if run.memory == START else run.memory)
        subject = Subject if memory is None else partial(BaselineSubject, memory)
        line: dict[str, Any] = said.get("last", {})
        said = wanted | {"cpu_seconds": said.get("cpu_seconds", 0.0), "finished": False}
        began = time.process_time()

        def report(metrics: dict[str, Any]) -> None:
            line.update(metrics)
            if "step" in metrics and metrics["step"] % 100 == 0:
                shown = ("stage", "step", "tokens", "seconds", "loss")
                print("  " + ", ".join(f"{n} {metrics[n]}" for n in shown), flush=True)

        try:
            train(config, texts, resume=resume, report=report, subject=subject)
            said["finished"] = True
        finally:
            said["cpu_seconds"] += time.process_time() - began
            said["last"] = line
            with replacement(out / "run.json", mode=0o644) as file:
                file.write(json.dumps(said, indent=1).encode())
        print(f"{run.name}: {said['cpu_seconds'] / 60:.1f} minutes of a core", flush=True)

    def _prepared(self, run: Run, out: Path) -> list[Path]:
        """The files of a run's text, tokenised for all runs of that text and preset."""
        texts = self._texts.get(run.text)
        if not texts:
            raise InvalidInput(f"{run.name} is not trained yet: name texts with --{run.text}")
        shared = shared_tokens(self.directory, run.text, texts, PRESETS[run.preset].vocab_size)
        with suppress(FileExistsError):
            (out / "tokens").symlink_to(shared.resolve(), target_is_directory=True)
        return texts


def shared_tokens(directory: Path, name: str, texts: Sequence[Path], vocabulary: int) -> Path:
    """The directory, inside this one, of the tokenizer that is trained on texts (tokenizer.json)
    and of their tokens: for TokenCorpus.build.
    """
    shared = directory / f"tokens-{name}-{vocabulary}"
    shared.mkdir(parents=True, exist_ok=True)
    path = shared / "tokenizer.json"
    if not path.exists():
        print(f"{shared.name}: a tokenizer of {vocabulary} ids", flush=True)
        Tokenizer.train(passages(read_documents(texts), Random(0)), vocabulary).save(path)
    TokenCorpus.build(texts, Tokenizer.load(path), shared)
    return shared


def parser(doc: str | None, seeds: Sequence[int] = (0,)) -> argparse.ArgumentParser:
    """A parser with the options of these tables: which runs, and texts to train and to measure."""
    options = plain_parser(doc)
    options.add_argument("--runs", type=Path, required=True, help="models are kept here")
    texts: dict[str, Any] = {"type": Path, "metavar": "TEXT"}
    add(options, "--books", [], "to train on", **texts)
    add(options, "--math", [], "to train on", **texts)
    add(options, "--test", [], "books to measure with", **texts)
    add(options, "--test-math", [], "mathematics to measure with", **texts)
    add(options, "--texts", 24, "that are read for every number")
    add(options, "--preset", "test", "shape of the models", choices=list(PRESETS))
    add(options, "--steps", STEPS, "of training, for every model")
    add(options, "--seeds", list(seeds), "one model each")
    add(options, "--precision", "auto", "of training", choices=["auto", "float32", "bfloat16"])
    return options


def runs_of(options: argparse.Namespace) -> Runs:
    """Those of the options."""
    return Runs(options.runs, {"books": options.books, "math": options.math}, options.precision)
