"""What a landmark model is: each token and head of it looks blocks up by trained landmark keys."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.model.adapter import ModelAdapter, Shape
from memstore.model.rotary import Rope


class LandmarkAdapter(ModelAdapter):
    """A reader whose every token and head looks blocks up by trained landmark keys."""

    rope: Rope
    # by layer [Hkv, D], the context miss token's key at position -1, whose share of attention is
    # the gate; None for a reader without a gate
    cmt_keys: Sequence[Tensor] | None
    # [L, H, D], what rows that skip their lookup get in its place; None = what they would have
    # given to memory goes to what they have seen
    cmt_values: Tensor | None
    landmark_id: int  # read after every block_size content tokens: its key is the landmark key

    @abstractmethod
    def question_ids(self, question: str) -> list[int]:
        """A question as it is read: as typed, or in a template."""

    def next_projections(
        self, layer_idx: int, states: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """q, k, v of layer_idx + 1, position-free, if layer_idx, which began with states [B, T,
        hidden_size], attended to `attended` [B, H, T, D]: what speculative prefetch searches with.
        None for a model that cannot tell; then nothing is prefetched.
        """
        return None


@dataclass(frozen=True)
class LandmarkHeads:
    """How the heads of a landmark model attend; the fields are LandmarkAdapter's. dtype, device: of
    their queries, keys and values.
    """

    shape: Shape
    rope: Rope
    cmt_keys: Sequence[Tensor] | None = None
    cmt_values: Tensor | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, model: LandmarkAdapter) -> "LandmarkHeads":
        """A model's."""
        return cls(
            model.shape, model.rope, model.cmt_keys, model.cmt_values, model.dtype, model.device
        )
