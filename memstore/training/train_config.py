"""What one training run is told: what is trained, on which stages, for how long, and where."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memstore.model.landmark.config import ModelConfig
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.finetune import Finetune

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
    # weights and tokenizer to start from: of this architecture
    init: Path | None = None
    tokenizer: Path | None = None  # a tokenizer.json, without init; None = one is made of the texts
    # a Hugging Face decoder that learns to attend by landmarks, in the place of `model`
    finetune: Finetune | None = None
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for
