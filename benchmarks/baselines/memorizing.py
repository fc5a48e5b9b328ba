"""Memorizing Transformers (Wu et al., arXiv 2203.08913): one layer also retrieves the nearest of
many earlier tokens' keys and values, without a gradient into them, and a gate a head mixes what
they say with attention to the cache and the segment.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.transformer_xl import CachedPast
from memstore.kernels.api import NEG, landmark_topk
from memstore.model.landmark.transformer import ModelConfig, Transformer


class Retrieval(nn.Module):
    """Learned parameters of the layer with a memory: a gate for each head, and a temperature for
    each head in place of 1 / sqrt(d), because its queries and keys have length 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(config.num_heads))
        self.log_scale = nn.Parameter(
            torch.full((config.num_heads,), 0.5 * math.log(config.head_dim))
        )


class TokenMemory:
    """Keys and values [B, Hkv, N, D] of tokens that were read, oldest first."""

    def __init__(self, top_k: int, tokens: int | None) -> None:
        """top_k: tokens that a row retrieves; tokens: the latest that are kept; None = all."""
        self.top_k, self.tokens = top_k, tokens
        self.held: tuple[Tensor, Tensor] | None = None

    def read(self, q: Tensor) -> Tensor:
        """The nearest by inner product of each row of q [B, H, T, D], under a softmax over them
        alone, [B, H, T, D]; zeros while there are none.
        """
        if not self.retrieved or self.held is None:
            return torch.zeros_like(q)
        # a KV head of every text is one of the index
        keys, values = (x.flatten(0, 1) for x in self.held)
        group = q.shape[1] // self.held[0].shape[1]
        with torch.no_grad():
            asked = q.detach().flatten(0, 1).to(keys.dtype)
            found = landmark_topk(asked, keys, [(0, keys.shape[1])], self.top_k).candidates
        missing, at = found < 0, found.clamp(min=0)
        head = torch.arange(len(at), device=q.device)[:, None, None] // group
        near = keys[head, at].to(q.dtype)  # (B * H, T, k, D)
        s = (q.flatten(0, 1)[:, :, None] @ near.transpose(-1, -2))[:, :, 0].masked_fill(
            missing, NEG
        )
        weights = s.softmax(-1)[:, :, None]
        return (weights @ values[head, at].to(weights.dtype))[:, :, 0].view(q.shape)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Remember k, v [B, Hkv, T, D], and forget the oldest beyond what is kept."""
        k, v = k.detach(), v.detach()
        if self.held is not None:
            k, v = torch.cat([self.held[0], k], 2), torch.cat([self.held[1], v], 2)
        first = 0 if self.tokens is None else max(0, k.shape[2] - self.tokens)
        self.held = k[:, :, first:], v[:, :, first:]

    @property
    def retrieved(self) -> int:
        """Tokens that a row reads now."""
        return 0 if self.held is None else min(self.top_k, self.held[0].shape[2])

    @property
    def bytes(self) -> int:
        """Of the keys and values that may be read."""
        return sum(x.nbytes for x in self.held or ())


class MemorizingPast(CachedPast):
    """A Transformer-XL cache in every layer, and a memory of tokens in one of them."""

    def __init__(
        self, model: Transformer, cache: int, chosen: MemoryConfig, learned: Retrieval
    ) -> None:
        """chosen: which layer has a memory, and of what; learned: its parameters."""
        super().__init__(model, cache)
        self.layer, self._learned = chosen.layer, learned
        self.memory = TokenMemory(chosen.top_k, chosen.tokens)
        self._own: list[tuple[Tensor, Tensor]] = []  # k, v of the open segment in that layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = super().attend(layer_idx, q, k, v)
        if layer_idx != self.layer:
            return local
        q, k = self._scaled(layer_idx, q, k)
        self._own.append((k, v))  # without position
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
            keys, values = zip(*self._own)
            self.memory.write(torch.cat(keys, 2), torch.cat(values, 2))
            self._own.clear()

    @property
    def bytes(self) -> int:
        return super().bytes + self.memory.bytes
