"""The interface of a model adapter: all that sessions, ingest and search know of a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.disk.format.signature import Signature
from memstore.disk.tables.runs import IndexSpec
from memstore.model.lookup_settings import AnswerSettings, LookupSettings
from memstore.model.tokenizer import TokenText

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Called once a layer with (layer_idx, q [B, H, T, D], k and v [B, Hkv, T, D]), without
positions; returns the attention output [B, H, T, D].
"""
Enter = Callable[[int, Tensor], None]
"""Called before each layer with (layer_idx, the states [B, T, hidden_size] that enter it)."""


class Enough(Exception):
    """Raised by an Attend that needs nothing more of a forward pass; ModelAdapter.hidden lets it
    propagate, and computes nothing more.
    """


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and the layers that have a memory."""

    num_layers: int
    memory_layers: tuple[int, ...]  # layers that look up old blocks, and whose landmarks are kept
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # content tokens in a block; its landmark is one more position
    # the distance in positions at which a query sees every old block; None = the slots of the
    # paper's stingy mapping (docs/appendix/method.md section 4)
    old_block_distance: int | None
    kv_dtype: torch.dtype  # of stored keys and values

    @property
    def stride(self) -> int:
        """Positions of a block with its landmark: block_size + 1."""
        return self.block_size + 1

    @property
    def passage_width(self) -> int:
        """Numbers in the keys of one token, over all memory layers and KV heads; its values have as
        many.
        """
        return len(self.memory_layers) * self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends to its keys. Scores are scale * q.k, or cap * tanh(scores / cap) with a
    softcap; a query does not see keys `window` or more positions before it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class ModelAdapter(ABC):
    """A decoder with rotary positions whose attention the caller computes."""

    shape: Shape
    lookup: LookupSettings  # what lookups do unless told otherwise
    answering: AnswerSettings  # how answers are generated unless told otherwise
    codec: str  # in which a memory made for it is best kept
    tokenizer: TokenText

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """The identity of the model, which its memories store."""

    @property
    @abstractmethod
    def keeps(self) -> IndexSpec | None:
        """The search data that its memories store; None for trained landmarks in every memory
        layer.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the model."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of its states, queries, keys and values."""

    @abstractmethod
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
        """Run ids [B, T] through the first `layers` layers (None: all) -> states [B, T,
        hidden_size]; after all layers, the states that `logits` takes.

        quantized: use quantized weights if the model has some; for generated tokens only, never for
        what is stored. adapt: use the model's reading adapter, if it has one.
        """

    @abstractmethod
    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """Logits [n, vocabulary], float32 or wider, of states [n, hidden_size]; tokens that are not
        text (the landmark) have a large negative logit. quantized: as in hidden.
        """
