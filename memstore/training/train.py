"""A run of landmark training: configuration, model, optimizers, and the loop over the stages of a
curriculum, which resumes at every checkpoint and writes metrics next to the weights.
"""

import json
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memstore import devices
from memstore.disk.files import replacement
from memstore.errors import InvalidConfig, InvalidInput
from memstore.freed_memory import keep_freed_memory
from memstore.model.landmark.landmark_model import (
    load_checkpoint,
    read_configuration,
    save_checkpoint,
)
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from memstore.training.batches import RecallData
from memstore.training.corpus import TokenCorpus, passages, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.objectives import Steps

_CLIP = 1.0
_MIN_LR = 0.03  # of the learning rates, at the end of a stage
_MOMENTUM, _DECAY = 0.95, 0.01  # of Muon

Precision = Literal["auto", "float32", "bfloat16"]
Report = Callable[[dict[str, Any]], None]
"""Called with every line of metrics."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. minutes: limit of wall time; learning rates decay by steps or time,
    whichever ends first.
    """

    out: Path  # the directory of the checkpoint, its metrics and its state
    model: ModelConfig = field(default_factory=ModelConfig)
    stages: tuple[Stage, ...] = field(default_factory=default_curriculum)
    # shared among the stages in proportion to their steps times what a step costs
    minutes: float | None = None
    seed: int = 0
    threads: int = 1
    # where it computes, such as "cuda"; no part of a run: it is resumed on any device
    device: str = "cpu"
    # weights and tokenizer to start from: of this architecture
    init: Path | None = None
    tokenizer: Path | None = None  # a tokenizer.json, without init; None = one is made of the texts
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for


class Subject:
    """The model that a run trains: a landmark model with its tokenizer, on the run's device.
    Subclasses train models with other memories.
    """

    steps: type[Steps] = Steps  # computes the losses of steps

    def __init__(
        self, config: TrainConfig, texts: Sequence[Path], device: torch.device, resume: bool
    ) -> None:
        """resume: load the weights of the run in `config.out` into the model."""
        model, self.tokenizer = begin_model(config, texts, resume)
        self.model: Transformer = model.to(device)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that must be equal in a resumed run, as plain values."""
        return {}

    @property
    def learning(self) -> dict[str, Tensor]:
        """Trainable weights by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """New optimizers for a stage."""
        return make_optimizers(self.model, stage.lr, stage.muon_lr)

    def save(self, directory: Path) -> None:
        """Write a model that --model accepts. Raises OSError."""
        save_checkpoint(self.model, self.tokenizer, directory)


def begin_model(
    config: TrainConfig, texts: Sequence[Path], resume: bool
) -> tuple[Transformer, Tokenizer]:
    """Make a Transformer and its tokenizer, with new weights or those of `config.init`. resume:
    with the configuration and tokenizer of the run in `config.out`. Raises InvalidConfig,
    InvalidWeights, InvalidInput.
    """
    form = _begun_with(config) if resume else config.model
    tokenizer = _tokenizer(config, texts, form, resume=resume)
    return new_model(form, None if resume else config.init, config.seed), tokenizer


def new_model(config: ModelConfig, init: Path | None, seed: int) -> Transformer:
    """A Transformer of a configuration, with random weights, or those of `init`.

    init: a checkpoint. Raises InvalidConfig if its architecture differs, InvalidWeights.
    """
    model = Transformer(config)
    if init is None:
        model.initialise(torch.Generator().manual_seed(seed))
        return model
    first, _ = load_checkpoint(init)
    first.cmt_values = None  # measured of these weights, not of those that come of them
    if first.config.architecture() != config.architecture():
        raise InvalidConfig(
            f"{init} is a model of another architecture; leave out --preset or --init"
        )
    model.load_state_dict(first.state_dict())
    return model


def _begun_with(config: TrainConfig) -> ModelConfig:
    """The configuration of the resumed run. Raises InvalidConfig for a different request."""
    begun = read_configuration(config.out)
    asked = config.model.architecture()
    other = [f"{n} {x}" for n, x in begun.architecture().items() if x != asked[n]]
    if other:
        raise InvalidConfig(
            f"{config.out} was begun with another model ({', '.join(other)}); leave --preset out, "
            "or choose another directory"
        )
    return begun


def _tokenizer(
    config: TrainConfig, texts: Sequence[Path], model: ModelConfig, *, resume: bool
) -> Tokenizer:
    """The tokenizer of the resumed run, or a new one. Without `resume`, a tokenizer of an earlier
    run in `config.out` is overwritten: it may come from other texts or weights.
    """
    path = config.out / "tokenizer.json"
    if resume:
        tokenizer = Tokenizer.load(path)
    elif config.init is not None:
        tokenizer = Tokenizer.load(config.init / "tokenizer.json")
    elif config.tokenizer is not None:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        tokenizer = Tokenizer.train(
            passages(read_documents(texts), random.Random(config.seed)), model.vocab_size
        )
    if tokenizer.vocab_size != model.vocab_size:
        raise InvalidConfig(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is "
            f"{model.vocab_size}; train on more text, or choose a --preset that fits"
        )
    if not resume:
        tokenizer.save(path)
    return tokenizer


# Muon for the matrices of the layers, AdamW for everything else


def orthogonalise(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix to `gradient` [m, n], approximately, by a quintic
    Newton-Schulz iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / (gradient.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for 2-d parameters (K. Jordan, "Muon", 2024);
    Nesterov, decoupled decay.

    On a CUDA device the iteration runs in bfloat16, as it was published: float32 does not use the
    tensor cores. `torch.optim.Muon` runs it in bfloat16 everywhere, which takes 25 times as long on
    a CPU without instructions for it (1.06 s a step instead of 0.04 at a million parameters) and
    gains a tenth on one with them; losses are alike.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - _MOMENTUM)
                gradient = p.grad.lerp(buffer, _MOMENTUM)
                update = orthogonalise(gradient.bfloat16() if gradient.is_cuda else gradient)
                p.mul_(1 - group["lr"] * _DECAY)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def make_optimizers(model: nn.Module, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """AdamW at `lr` for embeddings and gains, Muon at `muon_lr` for the matrices of the layers."""
    named = list(model.named_parameters())
    matrices = {name for name, p in named if p.dim() == 2 and "embedding" not in name}
    others = [p for name, p in named if name not in matrices]
    return [
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        Muon([p for name, p in named if name in matrices], lr=muon_lr),
    ]


# The loop


@dataclass
class Progress:
    """The position of a training run, from which it resumes."""

    stage: int = 0
    step: int = 0  # inside the stage
    seconds: float = 0.0  # of training, in all stages
    stage_seconds: float = 0.0  # of training, in this stage


def train(
    config: TrainConfig,
    texts: Sequence[Path],
    *,
    resume: bool = False,
    report: Report | None = None,
    subject: Callable[[TrainConfig, Sequence[Path], torch.device, bool], Subject] = Subject,
) -> Transformer:
    """Train on .txt or .jsonl.zst files, and write checkpoints to `config.out`; returns the model.

    resume: continue the run in `config.out` at its last checkpoint, with its model and tokenizer.
    report: called with every line of metrics; the first states the precision. subject: makes the
    model. Raises InvalidConfig for a device that this machine lacks, and for a model that differs
    from the resumed run's.
    """
    device = devices.usable_device(config.device)
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    config.out.mkdir(parents=True, exist_ok=True)
    state_path = config.out / "state.pt"
    if resume and not state_path.is_file():
        raise InvalidInput(f"{config.out} holds no training run to resume (state.pt is missing)")
    if not resume and state_path.is_file():
        raise InvalidInput(
            f"{config.out} already holds a training run; resume it with --resume or choose another "
            "directory"
        )
    state = read_state(state_path) if resume else None
    trained = subject(config, texts, device, resume)
    corpus = TokenCorpus.build(texts, trained.tokenizer, config.out / "tokens")
    precision: str = config.precision
    if precision == "auto" and state is not None:
        precision = state["precision"]  # as the run began
    elif precision == "auto":
        precision = str(devices.fast_dtype(device)).removeprefix("torch.")
    run = _Run(config, trained, corpus, device, precision, report or (lambda line: None))
    if state is not None:
        run.restore(state)
    else:
        (config.out / "metrics.jsonl").unlink(missing_ok=True)
    run.write({"precision": precision})
    run.go()
    return trained.model


def update(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor) -> None:
    """Take one training step: clipped gradients of the loss, then the optimizers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    for optimizer in optimizers:
        optimizer.step()


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint of tensors and plain values, atomically and as CPU tensors. Raises
    OSError.
    """
    with replacement(path, mode=0o644) as file:
        try:
            torch.save(tree_map_only(Tensor, Tensor.cpu, state), file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # of a disk that is full
                raise error.__context__ from None
            raise


def read_state(path: Path) -> dict[str, Any]:
    """Read a file of write_state. Raises InvalidInput for an incomplete file."""
    try:
        state: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidInput(
            f"{path} is damaged and cannot be resumed; remove it, or start elsewhere: {error}"
        ) from None
    return state


class _Run:
    """The mutable state of a run."""

    def __init__(
        self,
        config: TrainConfig,
        subject: Subject,
        corpus: TokenCorpus,
        device: torch.device,
        precision: str,
        report: Report,
    ) -> None:
        self.config, self.subject, self.device = config, subject, device
        self.precision, self._report = precision, report
        # since the last line of metrics
        self._steps, self._loss = 0, 0.0
        self._right, self._asked = Counter[str](), Counter[str]()
        size = subject.model.shape.block_size
        self.data = RecallData(
            subject.tokenizer, corpus, config.stages[0].data, size, config.seed + 2
        )
        self.steps = subject.steps(subject.model, self.data, device, config.seed)
        self.progress = Progress()
        self.optimizers: list[torch.optim.Optimizer] = []
        self._start_stage()

    def _start_stage(self) -> None:
        stage = self.stage
        self.data.config = stage.data
        self.optimizers = self.subject.optimizers(stage)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    @property
    def stage(self) -> Stage:
        return self.config.stages[min(self.progress.stage, len(self.config.stages) - 1)]

    def go(self) -> None:
        while self.progress.stage < len(self.config.stages):
            share = self._share_done()
            if share >= 1:
                self.save()
                at = self.progress.stage + 1
                self.progress = replace(self.progress, stage=at, step=0, stage_seconds=0.0)
                if at < len(self.config.stages):
                    self._start_stage()
                continue
            self._step(share)
            if self.progress.step % self.config.save_every == 0:
                self.save()
            if self.progress.step % self.config.log_every == 0:
                self._log(share)
        self.save()

    def _share_done(self) -> float:
        share = self.progress.step / self.stage.steps
        if self.config.minutes is not None:
            weights = [s.steps * (1.0 if s.kind == "windows" else 3.0) for s in self.config.stages]
            minutes = self.config.minutes * weights[self.progress.stage] / sum(weights)
            share = max(share, self.progress.stage_seconds / 60 / minutes)
        return share

    def _step(self, share: float) -> None:
        started = time.monotonic()
        stage = self.stage
        factor = max(min(1.0, (self.progress.step + 1) / stage.warmup) * (1 - share), _MIN_LR)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            document, question = self.steps.losses(stage, share)
        total, weight = document.total, document.weight
        if question is not None:
            total, weight = total + question.total, weight + question.weight
        loss = total / weight
        update(self.subject.model, self.optimizers, loss)
        self._steps, self._loss = self._steps + 1, self._loss + float(loss.detach())
        for name, part in (("window", document), ("chunk", question)):
            if part is not None:
                self._right[f"{name}_lookup_accuracy"] += int(part.correct)
                self._asked[f"{name}_lookup_accuracy"] += part.lookups
        spent, p = time.monotonic() - started, self.progress
        p.step += 1
        p.seconds, p.stage_seconds = p.seconds + spent, p.stage_seconds + spent

    def _log(self, share: float) -> None:
        p = self.progress
        line = {
            "stage": self.stage.name,
            "step": p.step,
            "tokens": self.steps.tokens,
            "share": round(share, 4),
            "seconds": round(p.seconds, 1),
            "loss": round(self._loss / self._steps, 4),
        }
        line |= {n: round(self._right[n] / asked, 4) for n, asked in self._asked.items() if asked}
        self._steps, self._loss = 0, 0.0
        self._right.clear()
        self._asked.clear()
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Write and report a line of metrics: means over the steps since the last line. Raises
        OSError.
        """
        path = self.config.out / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            error.filename = str(path)
            raise
        self._report(line)

    def save(self) -> None:
        """Write the model and the state for `restore`. Raises OSError."""
        self.subject.save(self.config.out)
        state = {
            "progress": vars(self.progress),
            "model": {name: p.data for name, p in self.subject.learning.items()},
            "identity": self.subject.identity,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **self.steps.state(),
            "stages": [stage.name for stage in self.config.stages],
            "precision": self.precision,
        }
        write_state(self.config.out / "state.pt", state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state that `save` wrote."""
        if state["stages"] != [stage.name for stage in self.config.stages]:
            raise InvalidConfig(
                f"{self.config.out} was trained with other stages: {', '.join(state['stages'])}"
            )
        if state["identity"] != self.subject.identity:
            raise InvalidConfig(
                f"{self.config.out} was begun with another model, or other settings of it: "
                f"{state['identity'] or 'a landmark model'}"
            )
        self.progress = Progress(**state["progress"])
        self._start_stage()
        with torch.no_grad():
            for name, weight in self.subject.learning.items():
                weight.copy_(state["model"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps.restore(state)
