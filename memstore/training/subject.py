"""What a run is configured with, and what it trains: a model with its tokenizer, the weights that
learn, and how they are stored.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from memstore.errors import InvalidConfig
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import load_checkpoint, read_configuration, save_checkpoint
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer
from memstore.training.batches import RecallData
from memstore.training.corpus import CorpusTokenizer, passages, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.finetune import Finetune, HuggingFaceModel
from memstore.training.objectives import Trainee
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
    # a Hugging Face decoder that learns to attend by landmarks, in the place of `model`
    finetune: Finetune | None = None
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for


class Subject(Protocol):
    """What a run trains. Its model and what it keeps are on the device of the run."""

    @property
    def tokenizer(self) -> CorpusTokenizer:
        """What texts are cut by."""

    @property
    def model(self) -> Trainee:
        """What steps compute with."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on from, in plain values."""

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """Fresh ones, of the weights that learn."""

    def steps(self, data: RecallData, device: torch.device, seed: int) -> Steps:
        """What its steps compute."""

    def state(self) -> dict[str, torch.Tensor]:
        """The weights that learn, by name."""

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take the weights that `state` gave."""

    def save(self, directory: Path) -> None:
        """Leave a model that --model takes. Raises OSError."""


MakeSubject = Callable[[TrainConfig, Sequence[Path], torch.device, bool], Subject]
"""Takes the run, its texts, the device, and whether a run in `config.out` is resumed, whose weights
are `restore`d.
"""


class OwnModel:
    """A Transformer of a configuration: from nothing, or from weights of it or of a smaller one."""

    def __init__(
        self, config: TrainConfig, texts: Sequence[Path], device: torch.device, resume: bool
    ) -> None:
        """resume: with the configuration and the tokenizer of the run in `config.out`, whose
        weights are `restore`d. Raises InvalidConfig, InvalidWeights, InvalidInput.
        """
        model = _begun_with(config) if resume else config.model
        self.tokenizer = _tokenizer(config, texts, model, resume=resume)
        init = None if resume else config.init
        self.model = new_model(model, init, config.seed).to(device)
        self.identity: dict[str, Any] = {}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """Muon for the matrices, AdamW for the rest."""
        return make_optimizers(self.model, stage.lr, stage.muon_lr)

    def steps(self, data: RecallData, device: torch.device, seed: int) -> Steps:
        """Windows, and chunks that read them by landmarks."""
        return Steps(self.model, data, device, seed)

    def state(self) -> dict[str, torch.Tensor]:
        """All weights."""
        return self.model.state_dict()

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take them."""
        self.model.load_state_dict(state)

    def save(self, directory: Path) -> None:
        """A checkpoint: see memstore.model.landmark.checkpoint."""
        save_checkpoint(self.model, self.tokenizer, directory)


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


def by_landmarks(
    config: TrainConfig, texts: Sequence[Path], device: torch.device, resume: bool
) -> Subject:
    """A MakeSubject: a landmark model, or the Hugging Face decoder of `config.finetune`."""
    if config.finetune is None:
        return OwnModel(config, texts, device, resume)
    return HuggingFaceModel(config.finetune, config.seed, device)


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
    """The run's own, or a new one. What a run left that was killed before it could be resumed is
    of other texts or weights, perhaps.
    """
    path = config.out / "tokenizer.json"
    if resume:
        tokenizer = Tokenizer.load(path)
    elif config.init is not None:
        tokenizer = load_checkpoint(config.init)[1]
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
