"""The model that ships: a landmark-attention transformer with its tokenizer."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from memstore.devices import usable_device
from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidWeights
from memstore.kernels.api import NEG
from memstore.kernels.products import accumulate
from memstore.model.adapter import Attend, Enter
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import SHIPPED, SHIPPED_NAME, load_checkpoint, signature_of
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.landmark.transformer import Transformer
from memstore.openmp import warn_of_spinning
from memstore.paths import expanded


class LandmarkModel(LandmarkAPI):
    """A transformer and its tokenizer, with the API."""

    def __init__(
        self, transformer: Transformer, tokenizer: Tokenizer, called: ModelName | None = None
    ) -> None:
        """called: what its memories say that they were made with."""
        config = transformer.config
        self.transformer, self._called = transformer, called
        self.config: ModelConfig = config
        self.shape, self.lookup, self.rope = config.shape, config.lookup, transformer.rope
        self.landmark_id = config.landmark_id
        self.tokenizer: Tokenizer = tokenizer
        with torch.no_grad():
            self.cmt_keys, self.cmt_values = transformer.cmt_keys(), transformer.cmt_values

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model."""
        return replace(signature_of(self.transformer, self.tokenizer), model=self._called)

    @property
    def device(self) -> torch.device:
        return self.transformer.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool = False,
    ) -> Tensor:
        return self.transformer.hidden(ids, attend, layers=layers, enter=enter)

    def next_projections(
        self, layer_idx: int, states: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.transformer.next_projections(layer_idx, states, attended)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        logits = accumulate(self.transformer.logits(states))  # float16 has no NEG
        logits[..., self.landmark_id :] = NEG  # nor is the context miss token text
        return logits

    def question_ids(self, question: str) -> list[int]:
        return self.tokenizer.encode(question.rstrip())


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LandmarkModel:
    """The model that ships (None or its name, "books-1m"), or one from a directory written by
    `memstore train`.

    device: where it computes, such as "cuda", or "auto"; its memories have to be opened with the
    same. dtype: of its weights and of what it computes; landmark scores, softmaxes and logits are
    float32 under
    a half-precision one as well. Weights that lose digits by it are another model, with memories of
    its own.
    Raises InvalidWeights for a directory that is no model, or whose weights do not fit its
    configuration, and InvalidConfig for a device that this machine does not have.
    """
    directory = SHIPPED if name_or_path in (None, SHIPPED_NAME) else expanded(str(name_or_path))
    if not directory.is_dir():
        raise InvalidWeights(
            f"{directory} is no directory; name one written by `memstore train`, or leave the "
            "model out"
        )
    place = usable_device(device)
    warn_of_spinning(place)
    transformer, tokenizer = load_checkpoint(directory, dtype)
    shipped = directory == SHIPPED
    called = ModelName(
        SHIPPED_NAME if shipped else directory.resolve().name,
        SHIPPED_NAME if shipped else str(directory.resolve()),
    )
    return LandmarkModel(transformer.to(place), tokenizer, called)
