"""Training runs of a few small steps, interrupted and resumed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memstore.model.landmark.transformer import ModelConfig
from memstore.training.curriculum import Stage
from memstore.training.train import Subject, TrainConfig, train
from support.fake_device import FakeDevice

# the smallest model that trains
MODEL = ModelConfig(
    vocab_size=1024,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    block_size=16,
    chunk_blocks=2,
    top_k=2,
)
SMALL: dict[str, Any] = {
    "steps": 2,
    "batch": 4,
    "blocks": 3,
    "chunk_blocks": 2,
    "memory_windows": 4,
    "memory_blocks": 4,
    "queue": 32,
    "negatives": 1.0,
    "warmup": 1,
}


def small(stage: Stage, **changes: Any) -> Stage:
    """A stage with few steps of small batches."""
    return replace(stage, **{**SMALL, **changes})


def train_in_turns(
    turns: Sequence[TrainConfig],
    books: Sequence[Path],
    every: int = 1,
    subject: Callable[..., Any] = Subject,
) -> tuple[list[float], Any]:
    """The losses and the model of one run, interrupted after `every` losses in every turn but the
    last.

    The device "cuda" is a stand-in for one.
    """
    losses: list[float] = []

    def report(line: dict[str, Any]) -> None:
        if "loss" in line:
            losses.append(line["loss"])
            if len(losses) % every == 0 and len(losses) < every * len(turns):
                raise KeyboardInterrupt

    for turn, config in enumerate(replace(turn, save_every=1) for turn in turns):
        with FakeDevice() if config.device == "cuda" else nullcontext():
            try:
                model = train(config, books, resume=turn > 0, report=report, subject=subject)
            except KeyboardInterrupt:
                continue
            assert {p.device.type for p in model.parameters()} == {torch.device(config.device).type}
            return losses, model
    raise AssertionError("the last turn was interrupted")
