"""Reading a text with a memory, token by token or in one go: what benchmarks score and ask; and
such a model on disk, a checkpoint with a file that says which memory it has.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.transformer import BaselineTransformer
from memstore import LandmarkModel
from memstore.closing import Closing
from memstore.decode import from_json
from memstore.disk.files import replacement
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.kernels.api import NEG
from memstore.kernels.reference import accumulate
from memstore.model.landmark.landmark_model import load_checkpoint, save_checkpoint, signature_of
from memstore.model.tokenizer import Tokenizer

MEMORY = "memory.json"  # beside config.json


class BaselineModel:
    """A BaselineTransformer and its tokenizer."""

    def __init__(self, transformer: BaselineTransformer, tokenizer: Tokenizer) -> None:
        self.transformer, self.tokenizer, self.config = transformer, tokenizer, transformer.config
        self.shape, self.lookup = transformer.shape, transformer.lookup

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.transformer.norm.weight.device

    @cached_property
    def weights(self) -> str:
        """A digest of the weights and of what the memory is."""
        signature = signature_of(self.transformer, self.tokenizer)
        memory = sorted(asdict(self.transformer.memory_config).items())
        both = f"{signature.digest.hex()} {memory}"
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()

    def session(self, cache: int | None = None) -> "Reading":
        """A reading of a text from its beginning. cache: tokens before the segment, instead of
        those it was trained with.
        """
        return Reading(self, cache)


AnyModel = LandmarkModel | BaselineModel


class Reading(Closing):
    """One text being read: `feed` takes tokens, and states come out."""

    def __init__(self, model: BaselineModel, cache: int | None) -> None:
        """Use BaselineModel.session."""
        self.model = model
        self.past = model.transformer.begin(cache)

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens; returns states [n, hidden_size]. Row i predicts the token after ids[i]."""
        given = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        return self.model.transformer.read(given, self.past)[0]

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states; what is no text is never predicted."""
        logits = accumulate(self.model.transformer.logits(states))
        logits[..., self.model.transformer.landmark_id :] = NEG
        return logits

    def close(self) -> None:
        """As sessions have it: there is nothing to let go of."""


def save_baseline(
    model: BaselineTransformer,
    tokenizer: Tokenizer,
    directory: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write what `load_baseline` takes. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with replacement(directory / MEMORY, mode=0o644) as file:
        file.write(json.dumps(asdict(model.memory_config), indent=2).encode() + b"\n")
    save_checkpoint(model, tokenizer, directory, dtype)


def load_baseline(directory: Path | str, *, dtype: torch.dtype = torch.float32) -> BaselineModel:
    """Load the model that `save_baseline` wrote to a directory. Raises InvalidWeights,
    InvalidConfig.
    """
    directory = Path(directory)
    memory = memory_of(directory)
    if memory is None:
        raise InvalidWeights(f"{directory} has no {MEMORY}: it is no baseline's")
    found, tokenizer = load_checkpoint(
        directory, dtype, make=lambda config: BaselineTransformer(config, memory)
    )
    assert isinstance(found, BaselineTransformer)
    return BaselineModel(found, tokenizer)


def memory_of(directory: Path) -> MemoryConfig | None:
    """Which memory the model of a directory has; None for landmarks. Raises InvalidConfig."""
    path = directory / MEMORY
    if not path.exists():
        return None
    try:
        return from_json(path.read_bytes(), MemoryConfig)
    except ValueError as error:
        raise InvalidConfig(f"{path} says no memory that is known: {error}") from None
