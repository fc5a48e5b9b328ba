"""The training loop: stages of a curriculum, resumable at every checkpoint, with a metrics file
beside the weights.
"""

import ctypes
import json
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memstore import devices
from memstore.errors import InvalidConfig, InvalidInput
from memstore.model.checkpoint import load_checkpoint, save_checkpoint
from memstore.model.config import ModelConfig
from memstore.model.tokenizer import Tokenizer
from memstore.model.transformer import Transformer
from memstore.training.batches import RecallData
from memstore.training.corpus import TokenCorpus, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.grow import grow
from memstore.training.objectives import (
    Loss,
    Negatives,
    encode_windows,
    negatives_of,
    next_token_loss,
    read_memory,
)
from memstore.training.optimizer import make_optimizers

_CLIP = 1.0

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class TrainConfig:
    """One training run. `minutes` bounds the wall clock: the learning rates then decay by whichever
    runs out first.
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
    # weights and tokenizer to start from: of this configuration, or one that grows into it
    init: Path | None = None
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for


@dataclass
class Progress:
    """Where a run is: what a resumed run goes on from."""

    stage: int = 0
    step: int = 0  # inside the stage
    total_steps: int = 0
    seconds: float = 0.0
    stage_seconds: float = 0.0


Report = Callable[[dict[str, Any]], None]


def train(
    config: TrainConfig,
    texts: Sequence[Path],
    *,
    resume: bool = False,
    report: Report | None = None,
) -> Transformer:
    """Train on text files or .jsonl.zst and leave a checkpoint in `config.out`; returns the model.

    resume: go on from the run that stands there. report: called with every line of metrics, the
    first of which says the precision. KeyboardInterrupt saves a checkpoint before it is raised
    again. Raises InvalidConfig for an unknown precision and a device that this machine does not
    have.
    """
    if config.precision not in get_args(Precision):
        raise InvalidConfig(
            f"precision {config.precision!r}; choose one of {', '.join(get_args(Precision))}"
        )
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
    state = _read_state(state_path) if resume else None
    tokenizer = _tokenizer(config, texts)
    corpus = TokenCorpus.build(texts, tokenizer, config.out / "tokens")
    precision, reason = _precision(config.precision, device, state)
    run = _Run(config, tokenizer, corpus, device, precision, report or (lambda line: None))
    if state is not None:
        run.restore(state)
    else:
        (config.out / "metrics.jsonl").unlink(missing_ok=True)
    run.write({"precision": precision, "because": reason})
    try:
        run.go()
    except KeyboardInterrupt:
        run.save()
        raise
    return run.model


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: without it every large activation is mapped and page-faulted
    anew (measured: 2x a step).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            mmap_max, trim_threshold, top_pad = -4, -1, -2
            libc.mallopt(mmap_max, 0)
            libc.mallopt(trim_threshold, 2**31 - 1)
            libc.mallopt(top_pad, 1 << 28)


def _tokenizer(config: TrainConfig, texts: Sequence[Path]) -> Tokenizer:
    path = config.out / "tokenizer.json"
    if path.is_file():
        tokenizer = Tokenizer.load(path)
    elif config.init is not None:
        tokenizer = load_checkpoint(config.init)[1]
        tokenizer.save(path)
    else:
        tokenizer = Tokenizer.train(
            _cuts(read_documents(texts), random.Random(config.seed)), config.model.vocab_size
        )
        tokenizer.save(path)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise InvalidConfig(
            f"{path} has {tokenizer.vocab_size} ids but the model's vocab_size is "
            f"{config.model.vocab_size}; "
            "train on more text or choose another directory"
        )
    return tokenizer


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidInput(
            f"{path} is damaged and cannot be resumed; start again in another directory: {error}"
        ) from None
    return state


def _precision(
    asked: Precision, device: torch.device, state: dict[str, Any] | None
) -> tuple[str, str]:
    """The precision of a run and why; `state` is that of the run that is resumed."""
    if asked != "auto":
        return asked, "it was asked for"
    if state is not None:  # all runs were in bfloat16 before there was a choice
        return state.get("precision", "bfloat16"), "the run began with it"
    name = str(devices.fast_dtype(device)).removeprefix("torch.")
    if device.type == "cuda":
        return name, "a GPU is faster at it"
    gain = devices.bfloat16_gain()
    return name, f"this CPU multiplies bfloat16 at {gain:.2g} times float32's speed"


def _cuts(documents: Iterable[str], rng: random.Random, length: int = 24_000) -> Iterator[str]:
    """Two passages of every document: enough for a tokenizer's merges, and the text need not fit in
    memory.
    """
    for text in documents:
        for _ in range(2):
            start = rng.randrange(max(1, len(text) - length))
            yield text[start : start + length]


def update(model: Transformer, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor) -> None:
    """One step down the loss: gradients, clipped, and the optimisers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    for optimizer in optimizers:
        optimizer.step()


class _Run:
    """The mutable state of a run. Draws are made on the CPU, so that they are the same on every
    device.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Tokenizer,
        corpus: TokenCorpus,
        device: torch.device,
        precision: str,
        report: Report,
    ) -> None:
        self.config, self.tokenizer, self.device = config, tokenizer, device
        self.precision, self.report = precision, report
        self.model = Transformer(config.model)
        self.model.initialise(torch.Generator().manual_seed(config.seed))
        if config.init is not None:
            first, _ = load_checkpoint(config.init)
            if first.config.architecture() != config.model.architecture():
                first = grow(first, config.model, torch.Generator().manual_seed(config.seed))
            self.model.load_state_dict(first.state_dict())
        self.model.to(device)
        self.rng = random.Random(config.seed)
        self.generator = torch.Generator().manual_seed(config.seed + 1)
        self.data = RecallData(tokenizer, corpus, config.stages[0].data, config.seed + 2)
        self.queue: list[list[Negatives]] = []  # newest first; of each step, one entry a layer
        self.progress = Progress()
        self.optimizers: list[torch.optim.Optimizer] = []
        self._start_stage()

    def _start_stage(self) -> None:
        stage = self.stage
        self.data.config = replace(stage.data, block_size=self.config.model.block_size)
        self.optimizers = make_optimizers(self.model, stage.lr, stage.muon_lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    @property
    def stage(self) -> Stage:
        return self.config.stages[min(self.progress.stage, len(self.config.stages) - 1)]

    def go(self) -> None:
        lines: list[dict[str, float]] = []
        while self.progress.stage < len(self.config.stages):
            started = time.monotonic()
            share = self._share_done()
            if share >= 1:
                self.save()
                self.progress = replace(
                    self.progress, stage=self.progress.stage + 1, step=0, stage_seconds=0.0
                )
                if self.progress.stage < len(self.config.stages):
                    self._start_stage()
                continue
            lines.append(self._step(share))
            spent = time.monotonic() - started
            p = self.progress
            p.step, p.total_steps = p.step + 1, p.total_steps + 1
            p.seconds, p.stage_seconds = p.seconds + spent, p.stage_seconds + spent
            if p.step % self.config.log_every == 0:
                self._log(lines, share)
                lines = []
            if p.step % self.config.save_every == 0:
                self.save()
        self.save()

    def _share_done(self) -> float:
        share = self.progress.step / self.stage.steps
        if self.config.minutes is not None:
            weights = [s.steps * (1.0 if s.kind == "windows" else 3.0) for s in self.config.stages]
            minutes = self.config.minutes * weights[self.progress.stage] / sum(weights)
            share = max(share, self.progress.stage_seconds / 60 / minutes)
        return share

    def _step(self, share: float) -> dict[str, float]:
        stage = self.stage
        factor = max(min(1.0, (self.progress.step + 1) / stage.warmup) * (1 - share), stage.min_lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            document, question = (
                self._windows(share) if stage.kind == "windows" else self._memory(share)
            )
        total, weight = document.total, document.weight
        if question is not None:
            total, weight = total + question.total, weight + question.weight
        loss = total / weight
        update(self.model, self.optimizers, loss)
        line = {"loss": float(loss.detach())}
        for kind, part in (("window", document), ("chunk", question)):
            if part is not None:
                line |= {f"{kind}_correct": float(part.correct), f"{kind}_answers": part.answers}
                line |= {
                    f"{kind}_lookups_correct": float(part.lookups_correct),
                    f"{kind}_lookups": part.lookups,
                }
        return line

    def _controlled(self, windows: int, blocks: int) -> Tensor | None:
        if not self.stage.cmt:
            return None
        return (torch.rand(windows, blocks, generator=self.generator) < 0.5).to(self.device)

    def _windows(self, share: float) -> tuple[Loss, None]:
        stage, first_last = self.stage, self.stage.gap
        gap = first_last[0] + (first_last[1] - first_last[0]) * min(1.0, share * 1.5)
        batch = self.data.windows(stage.batch, stage.blocks, gap=gap).to(self.device)
        jumps = None
        if stage.max_jump > 1:
            jumps = torch.randint(
                stage.max_jump, (stage.batch, stage.blocks), generator=self.generator
            )
            jumps[:, 0] = 0
            jumps = jumps.to(self.device)
        controlled = self._controlled(stage.batch, stage.blocks)
        hidden, _ = encode_windows(self.model, batch.ids, controlled, jumps, cmt=stage.cmt)
        return next_token_loss(self.model, hidden, batch.ids, batch.weights), None

    def _memory(self, share: float) -> tuple[Loss, Loss]:
        stage, size = self.stage, self.config.model.block_size
        memory = self.data.memory(stage.memory_windows, stage.memory_blocks).to(self.device)
        chunks, blocks = stage.batch, stage.chunk_blocks
        if self.rng.random() < stage.long_chunks:
            chunks, blocks = chunks // 2, blocks * 2
        questions = self.data.questions(memory, chunks, blocks, recents=self.config.model.top_k).to(
            self.device
        )
        controlled = self._controlled(stage.memory_windows, stage.memory_blocks)
        hidden, encoded = encode_windows(self.model, memory.ids, controlled, cmt=stage.cmt)
        fresh = negatives_of(encoded, self.rng.randrange(size))
        against, bias = None, 0.0
        if self.rng.random() < stage.negatives:
            against = [
                Negatives(
                    torch.cat([n.keys, *(q[i].keys for q in self.queue)], 1).to(n.keys.dtype),
                    torch.cat([n.values, *(q[i].values for q in self.queue)], 1).to(n.values.dtype),
                )
                for i, n in enumerate(fresh)
            ]
            if stage.negative_ramp:
                bias = stage.negative_start * max(0.0, 1 - share / stage.negative_ramp)
        answered = read_memory(
            self.model,
            questions.ids,
            encoded,
            questions.visible,
            questions.continues,
            against,
            bias,
            cmt=stage.cmt,
            top_k=self.config.model.top_k if memory.runs else None,
        )
        self._enqueue(fresh, memory.pass_key_window)
        return (
            next_token_loss(self.model, hidden, memory.ids, memory.weights),
            next_token_loss(self.model, answered, questions.ids, questions.weights),
        )

    def _enqueue(self, fresh: list[Negatives], pass_key_window: int | None) -> None:
        """Keep this step's landmarks for later steps, but never a pass key's: it would answer the
        next memory's question.
        """
        stage = self.stage
        window = torch.arange(stage.memory_windows).repeat_interleave(stage.memory_blocks)
        keep = window != (-1 if pass_key_window is None else pass_key_window)
        entry = [
            Negatives(n.keys.detach()[:, keep].clone(), n.values.detach()[:, keep].clone())
            for n in fresh
        ]
        held = max(1, stage.queue // (stage.memory_windows * stage.memory_blocks))
        self.queue = [entry, *self.queue][:held]

    def _log(self, lines: list[dict[str, float]], share: float) -> None:
        def total(name: str) -> float:
            return sum(line.get(name, 0.0) for line in lines)

        p = self.progress
        line: dict[str, Any] = {
            "stage": self.stage.name,
            "step": p.step,
            "total_steps": p.total_steps,
            "share": round(share, 4),
            "loss": round(total("loss") / len(lines), 4),
            "seconds": round(p.seconds, 1),
            "seconds_per_step": round(p.stage_seconds / p.step, 3),
        }
        for kind in ("window", "chunk"):
            for counted, name in (
                (f"{kind}_answers", "accuracy"),
                (f"{kind}_lookups", "lookup_accuracy"),
            ):
                if total(counted):
                    right = f"{kind}_correct" if name == "accuracy" else f"{kind}_lookups_correct"
                    line[f"{kind}_{name}"] = round(total(right) / total(counted), 4)
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics and report it."""
        with (self.config.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.report(line)

    def save(self) -> None:
        """Write the checkpoint and everything a resumed run needs, on the CPU whatever the
        device.
        """
        state = {
            "progress": vars(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.data.state(),
            "rng": list(self.rng.getstate()[1]),
            "generator": self.generator.get_state(),
            "queue": [[(n.keys, n.values) for n in entry] for entry in self.queue],
            "stages": [stage.name for stage in self.config.stages],
            "precision": self.precision,
        }
        temporary = self.config.out / "state.pt.partial"
        torch.save(tree_map_only(Tensor, Tensor.cpu, state), temporary)
        temporary.replace(self.config.out / "state.pt")
        save_checkpoint(self.model, self.tokenizer, self.config.out)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote."""
        if state["stages"] != [stage.name for stage in self.config.stages]:
            raise InvalidConfig(
                f"{self.config.out} was trained with other stages: {', '.join(state['stages'])}"
            )
        self.progress = Progress(**state["progress"])
        self._start_stage()
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.data.restore(state["data"])
        self.rng.setstate((3, tuple(state["rng"]), None))
        self.generator.set_state(state["generator"])
        self.queue = [
            [Negatives(keys.to(self.device), values.to(self.device)) for keys, values in entry]
            for entry in state["queue"]
        ]
