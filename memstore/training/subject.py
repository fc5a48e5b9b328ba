"""What a run trains: a model with its tokenizer, the weights that learn, and how they are kept."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memstore.errors import InvalidConfig
from memstore.model.checkpoint import load_checkpoint, save_checkpoint
from memstore.model.tokenizer import Tokenizer
from memstore.rivals.transformer import RivalTransformer, make
from memstore.training.corpus import CorpusTokenizer, passages, read_documents
from memstore.training.curriculum import Stage
from memstore.training.new_model import new_model
from memstore.training.objectives import Trainee
from memstore.training.optimizer import make_optimizers

if TYPE_CHECKING:
    from memstore.training.train import TrainConfig


class TrainedModule(Trainee, Protocol):
    """A Trainee that is a module."""

    def parameters(self) -> Any:
        """Its weights."""


class Subject(Protocol):
    """What a run trains. Its model and what it keeps are on the device of the run."""

    @property
    def tokenizer(self) -> CorpusTokenizer:
        """What texts are cut by."""

    @property
    def model(self) -> TrainedModule:
        """What steps compute with."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on from, in plain values."""

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """Fresh ones, of the weights that learn."""

    def state(self) -> dict[str, torch.Tensor]:
        """The weights that learn, by name."""

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take the weights that `state` gave."""

    def save(self, directory: Path) -> None:
        """Leave a model that --model takes. Raises OSError."""


class OwnModel:
    """A Transformer of a configuration, with whichever memory: from nothing, or from weights of it
    or of a smaller one.
    """

    def __init__(self, config: "TrainConfig", texts: Sequence[Path], device: torch.device) -> None:
        """Raises InvalidConfig, InvalidWeights, InvalidInput."""
        self.tokenizer = _tokenizer(config, texts)
        self.model = new_model(config.model, config.memory, config.init, config.seed)
        self.model.to(device)
        self.identity: dict[str, Any] = {}
        self._own_rates: dict[str, float] = {}
        if isinstance(self.model, RivalTransformer):
            self.identity["memory"] = self.model.memory_config.to_dict()
            self._own_rates = self.model.own_rates()

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """Muon for the matrices, AdamW for the rest."""
        return make_optimizers(self.model, stage.lr, stage.muon_lr, self._own_rates)

    def state(self) -> dict[str, torch.Tensor]:
        """All weights."""
        return self.model.state_dict()

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take them."""
        self.model.load_state_dict(state)

    def save(self, directory: Path) -> None:
        """A checkpoint: see memstore.model.checkpoint."""
        save_checkpoint(self.model, self.tokenizer, directory)


def _tokenizer(config: "TrainConfig", texts: Sequence[Path]) -> Tokenizer:
    path = config.out / "tokenizer.json"
    if path.is_file():
        tokenizer = Tokenizer.load(path)
    elif config.init is not None:
        tokenizer = load_checkpoint(config.init, other=make)[1]
    else:
        tokenizer = Tokenizer.train(
            passages(read_documents(texts), random.Random(config.seed)), config.model.vocab_size
        )
    if tokenizer.vocab_size != config.model.vocab_size:
        raise InvalidConfig(
            f"{path} has {tokenizer.vocab_size} ids but the model's vocab_size is "
            f"{config.model.vocab_size}; "
            "train on more text or choose another directory"
        )
    if not path.is_file():
        tokenizer.save(path)
    return tokenizer
