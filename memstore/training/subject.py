"""What a run is configured with, and what it trains: a model with its tokenizer, the weights that
learn, and how they are stored.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import InvalidConfig
from memstore.model.landmark.landmark_model import (
    load_checkpoint,
    read_configuration,
    save_checkpoint,
)
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import passages, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.optimizer import make_optimizers
from memstore.training.steps import Steps

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
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for


class Subject:
    """What a run trains: a landmark model with its tokenizer, on the device of the run. A model
    with another memory overrides what differs.
    """

    steps: type[Steps] = Steps  # computes the losses of steps

    def __init__(
        self, config: TrainConfig, texts: Sequence[Path], device: torch.device, resume: bool
    ) -> None:
        """resume: the run in `config.out`, whose weights are then copied into the model's."""
        model, self.tokenizer = begin_model(config, texts, resume)
        self.model: Transformer = model.to(device)

    @property
    def identity(self) -> dict[str, Any]:
        """What a run must have in common with the one that it resumes, in plain values."""
        return {}

    @property
    def learning(self) -> dict[str, Tensor]:
        """The weights that learn, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """Fresh ones for a stage."""
        return make_optimizers(self.model, stage.lr, stage.muon_lr)

    def save(self, directory: Path) -> None:
        """Leave a model that --model takes. Raises OSError."""
        save_checkpoint(self.model, self.tokenizer, directory)


def begin_model(
    config: TrainConfig, texts: Sequence[Path], resume: bool
) -> tuple[Transformer, Tokenizer]:
    """A Transformer of a configuration, from nothing or from the weights of `config.init`, and its
    tokenizer. resume: of the configuration and with the tokenizer of the run in `config.out`.
    Raises InvalidConfig, InvalidWeights, InvalidInput.
    """
    form = _begun_with(config) if resume else config.model
    tokenizer = _tokenizer(config, texts, form, resume=resume)
    return new_model(form, None if resume else config.init, config.seed), tokenizer


def new_model(config: ModelConfig, init: Path | None, seed: int) -> Transformer:
    """The decoder of a configuration.

    init: a checkpoint of this architecture. Raises InvalidConfig for another, InvalidWeights.
    """
    model = Transformer(config)
    if init is None:
        model.initialise(torch.Generator().manual_seed(seed))
        return model
    first, _ = load_checkpoint(init)
    first.cmt_values = None  # measured of these weights, not of those that come of them
    if first.config.architecture() != config.architecture():
        raise InvalidConfig(
            f"{init} is a model of another architecture; leave --preset out, or train from nothing"
        )
    model.load_state_dict(first.state_dict())
    return model


def _begun_with(config: TrainConfig) -> ModelConfig:
    """The model of the run that is resumed. Raises InvalidConfig where another is asked for."""
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
    """The tokenizer of the resumed run, or a new one. Without `resume`, a tokenizer that an earlier
    run left in `config.out` is overwritten: it may come from other texts or weights.
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
