"""What a landmark model is: each token and head of it looks blocks up by trained landmark keys."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from memstore.model.adapter import ModelAdapter
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
