"""Memorizing Transformers (Wu et al., arXiv 2203.08913): one layer also retrieves the nearest of
many earlier tokens' keys and values, without a gradient into them, and a gate a head mixes what
they say with attention to the cache and the segment.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.kernels.api import NEG, landmark_topk
from memstore.model.config import ModelConfig
from memstore.model.transformer import Transformer
from memstore.rivals.transformer_xl import CachedPast


class Retrieval(nn.Module):
    """What the layer with a memory learns: a gate b a head, and a temperature a head in the place
    of 1 / sqrt(d), since its queries and keys have length 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(config.num_heads))
        self.log_scale = nn.Parameter(
            torch.full((config.num_heads,), 0.5 * math.log(config.head_dim))
        )


class TokenMemory(ABC):
    """Keys and values of tokens that were read, oldest first."""

    @abstractmethod
    def read(self, q: Tensor) -> Tensor:
        """The nearest by inner product of each row of q [B, H, T, D], under a softmax over them
        alone, [B, H, T, D]; zeros while there are none.
        """

    @abstractmethod
    def write(self, k: Tensor, v: Tensor) -> None:
        """Remember k, v [B, Hkv, T, D], and forget the oldest beyond what is kept."""

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """keys and values [B, Hkv, N, D] that were written (nothing, where none were)."""

    @abstractmethod
    def hold(self, held: dict[str, Tensor]) -> None:
        """Remember what `held` gave."""

    @property
    @abstractmethod
    def retrieved(self) -> int:
        """Tokens that a row reads now."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Of the keys and values that may be read."""

    def close(self) -> None:  # noqa: B027
        """Let go of what lies elsewhere."""


class TensorMemory(TokenMemory):
    """In two tensors, for a batch and with gradients into the queries: what trains."""

    def __init__(self, top_k: int, tokens: int | None) -> None:
        """top_k: tokens that a row retrieves; tokens: the latest that are kept; None = all."""
        self.top_k, self.tokens = top_k, tokens
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def read(self, q: Tensor) -> Tensor:
        if self._keys is None or self._values is None or not self._keys.shape[2]:
            return torch.zeros_like(q)
        group, total = q.shape[1] // self._keys.shape[1], self._keys.shape[2]
        # a KV head of every text is one of the index
        keys, values = self._keys.flatten(0, 1), self._values.flatten(0, 1)
        with torch.no_grad():
            asked = q.detach().flatten(0, 1).to(keys.dtype)
            found = landmark_topk(asked, keys, [(0, total)], self.top_k).rows
        missing, at = found < 0, found.clamp(min=0)
        head = torch.arange(len(at), device=q.device)[:, None, None] // group
        near = keys[head, at].to(q.dtype)  # (B * H, T, k, D)
        s = (q.flatten(0, 1)[:, :, None] @ near.transpose(-1, -2))[:, :, 0].masked_fill(
            missing, NEG
        )
        weights = s.softmax(-1)[:, :, None]
        return (weights @ values[head, at].to(weights.dtype))[:, :, 0].view(q.shape)

    def write(self, k: Tensor, v: Tensor) -> None:
        k, v = k.detach(), v.detach()
        if self._keys is not None and self._values is not None:
            k, v = torch.cat([self._keys, k], 2), torch.cat([self._values, v], 2)
        first = 0 if self.tokens is None else max(0, k.shape[2] - self.tokens)
        self._keys, self._values = k[:, :, first:], v[:, :, first:]

    def held(self) -> dict[str, Tensor]:
        if self._keys is None or self._values is None:
            return {}
        return {"keys": self._keys, "values": self._values}

    def hold(self, held: dict[str, Tensor]) -> None:
        self._keys, self._values = held.get("keys"), held.get("values")

    @property
    def retrieved(self) -> int:
        return 0 if self._keys is None else min(self.top_k, self._keys.shape[2])

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.held().values())


class MemorizingPast(CachedPast):
    """A Transformer-XL cache in every layer, and a memory of tokens in one of them."""

    def __init__(
        self,
        model: Transformer,
        batch: int,
        cache: int,
        layer: int,
        learned: Retrieval,
        memory: TokenMemory,
    ) -> None:
        """layer: the one with a memory; learned: its parameters."""
        super().__init__(model, batch, cache)
        self.layer, self.memory, self._learned = layer, memory, learned
        self._own: list[tuple[Tensor, Tensor]] = []  # k, v of the open segment in that layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = super().attend(layer_idx, q, k, v)
        if layer_idx != self.layer:
            return local
        q, k = self._scaled(layer_idx, q, k)
        self._own.append((k.detach(), v.detach()))
        self.attended.keys += q.shape[2] * self.memory.retrieved
        gate = self._learned.gate.sigmoid()[:, None, None].to(local.dtype)
        return gate * self.memory.read(q).to(local.dtype) + (1 - gate) * local

    def _scaled(self, layer_idx: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx != self.layer:
            return super()._scaled(layer_idx, q, k)
        scale = self._learned.log_scale.exp()[:, None, None]
        return (F.normalize(q, dim=-1) * scale).to(q.dtype), F.normalize(k, dim=-1).to(k.dtype)

    def _close(self) -> None:
        super()._close()
        if self._own:
            self.memory.write(*self._opened())
            self._own.clear()

    def _opened(self) -> tuple[Tensor, Tensor]:
        """k, v of the open segment's tokens in the layer with a memory; without position."""
        keys, values = zip(*self._own)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def state(self) -> dict[str, Tensor]:
        opened = dict(zip(("own.keys", "own.values"), self._opened())) if self._own else {}
        return super().state() | opened

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self._own.clear()
        if "own.keys" in state:
            self._own.append((state["own.keys"].clone(), state["own.values"].clone()))

    def _held(self) -> dict[str, Tensor]:
        return super()._held() | {f"memory.{name}": x for name, x in self.memory.held().items()}

    def _hold(self, held: dict[str, Tensor]) -> None:
        super()._hold(held)
        self.memory.hold(
            {
                name: held[f"memory.{name}"]
                for name in ("keys", "values")
                if f"memory.{name}" in held
            }
        )

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in super()._held().values()) + self.memory.bytes

    def close(self) -> None:
        self.memory.close()
