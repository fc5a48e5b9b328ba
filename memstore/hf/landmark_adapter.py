"""A landmark-trained Hugging Face decoder as a model adapter: every token and head looks blocks up
by itself.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memstore.disk.format.signature import ModelName, Signature
from memstore.hf.landmark_decoder import LandmarkDecoder
from memstore.hf.model_rotary import rope_of
from memstore.hf.tokenizer import LandmarkTokenizer
from memstore.hf.weights import digest_of
from memstore.model.adapter import Attend, Enter
from memstore.model.landmark.landmark_api import LandmarkAPI


class HuggingFaceLandmarkModel(LandmarkAPI):
    """A LandmarkAdapter over a LandmarkDecoder and a transformers tokenizer, with the verbs."""

    cmt_values = None

    def __init__(
        self,
        decoder: LandmarkDecoder,
        tokenizer: Any,
        *,
        weights: str | None = None,
        called: ModelName | None = None,
    ) -> None:
        """weights: hex digest of the decoder's, if it is known. called: what its memories say that
        they were made with. Raises InvalidWeights for a
        tokenizer that changes the text.
        """
        self.decoder = decoder.requires_grad_(False).eval()
        self.shape, self.lookup, self.rope = decoder.shape, decoder.lookup, decoder.rope
        self.landmark_id = decoder.landmark_id
        self.tokenizer: LandmarkTokenizer = LandmarkTokenizer(tokenizer, decoder.landmark_id)
        self._weights, self._called = weights or digest_of(decoder), called
        with torch.no_grad():
            self.cmt_keys = decoder.cmt_keys()

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model, its landmarks and its tokenizer."""
        shape, config = self.shape, self.decoder.attached.config
        architecture = {"model_type": config.model_type, "rope": rope_of(config)}
        architecture |= {"landmarks": self.decoder.spec.trained}
        return Signature(
            weights=self._weights,
            tokenizer=self.tokenizer.fingerprint,
            architecture=architecture,
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            memory_layers=shape.memory_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            model=self._called,
        )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
    ) -> Tensor:
        return self.decoder.hidden(ids, attend, layers=layers, enter=enter, quantized=quantized)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        return self.decoder.logits(states, quantized=quantized)

    def question_ids(self, question: str) -> list[int]:
        return self.tokenizer.encode(question.rstrip())
