"""What a model adapter is: all that sessions, ingest, search and index-building know of a model."""

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
"""Called once a layer with (layer_idx, q [B, H, T, D], k and v [B, Hkv, T, D]), position-free;
returns what was attended to, [B, H, T, D].
"""
Enter = Callable[[int, Tensor], None]
"""Told (layer_idx, the states [B, T, hidden_size] that the layer begins with), before it does."""


class Enough(Exception):
    """Raised by an Attend that has seen what it wanted: nothing more is computed, and
    ModelAdapter.hidden lets it through.
    """


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and where its memory is."""

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
        """Values that the keys of one token are, in all memory layers and KV heads; its values
        are as many.
        """
        return len(self.memory_layers) * self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends, beside its keys: scores are scale * q.k, cap * tanh(scores / cap) where
    there is a softcap; keys `window` or more positions before a query are out of its reach.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class ModelAdapter(ABC):
    """A decoder with rotary positions whose attention is given from outside."""

    shape: Shape
    lookup: LookupSettings  # what lookups do unless told otherwise
    answering: AnswerSettings  # how answers are generated unless told otherwise
    codec: str  # in which a memory made for it is best kept
    tokenizer: TokenText

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """What ties a memory to this model."""

    @property
    @abstractmethod
    def keeps(self) -> IndexSpec | None:
        """What its memories keep to be found by; None for trained landmarks in every memory
        layer.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its states, queries, keys and values."""

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
        """ids [B, T] through the first `layers` layers (None = all) -> their states [B, T,
        hidden_size], after all of them those that `logits` takes.

        quantized: weights of fewer bits will do, where the model has them; of tokens that are
        generated, and of nothing that is stored. adapt: with the model's reading adapter, where it
        has one.
        """

    @abstractmethod
    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """States [n, hidden_size] -> float32 or wider [n, vocabulary]; what is no text (the
        landmark) has a large negative number. quantized: as in hidden.
        """
