"""The decoder: RMSNorm, RoPE attention, SwiGLU, tied embeddings. What attends to what is the
caller's, through one seam.

`Transformer.hidden(ids, attend)` calls `attend(layer_idx, q, k, v)` once a layer with
position-free queries, keys and values [B, H, T, D] and goes on with what it returns; training and
sessions pass different functions and share every weight.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.model.adapter import Attend, Enter
from memstore.model.landmark.config import ModelConfig
from memstore.model.rotary import Rope


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DecoderLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, mlp = config.hidden_size, config.mlp_size
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, heads, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, mlp, bias=False)
        self.up_proj = nn.Linear(hidden, mlp, bias=False)
        self.down_proj = nn.Linear(mlp, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, T, hidden] -> position-free q [B, H, T, D] and k, v [B, Hkv, T, D]."""
        x = self.attention_norm(x)
        q, k = self._heads(self.q_norm, self.q_proj(x)), self._heads(self.k_norm, self.k_proj(x))
        return q, k, self._heads(None, self.v_proj(x))

    def _heads(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """[B, T, H * D] -> normalised [B, H, T, D]."""
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def mlp(self, x: Tensor) -> Tensor:
        """x plus its SwiGLU."""
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        attended = attend(*self.project(x)).transpose(1, 2).flatten(2)
        return self.mlp(x + self.o_proj(attended))


class Transformer(nn.Module):
    """The decoder of a ModelConfig, with RoPE as `self.rope`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape, self.lookup = config.shape, config.lookup
        self.landmark_id = config.landmark_id
        self.rope = Rope(config.head_dim, config.rope_base, config.rope_interleaved)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        # by layer and head [L, H, D], what rows that skip their lookup get; None = not measured
        self.cmt_values: Tensor | None
        self.register_buffer("cmt_values", None)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights of deviation 0.02, the projections back into the residual stream smaller
        by sqrt(2 * layers).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_stream else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.norm.weight.dtype

    def _layers(self) -> Iterator[DecoderLayer]:
        for block in self.blocks:
            assert isinstance(block, DecoderLayer)
            yield block

    def hidden(
        self, ids: Tensor, attend: Attend, *, layers: int | None = None, enter: Enter | None = None
    ) -> Tensor:
        """ids [B, T] -> normalised last hidden states [B, T, hidden]; `attend` as in the module's
        docstring.

        layers: only the first of them; then the states are not normalised. enter(layer_idx, x):
        told the states [B, T, hidden] that a layer begins with, before it does.
        """
        x = self.embedding(ids)
        for layer, block in enumerate(self.blocks[:layers]):
            if enter is not None:
                enter(layer, x)
            x = block(x, lambda q, k, v, layer=layer: attend(layer, q, k, v))
        return self.norm(x) if layers in (None, len(self.blocks)) else x

    def next_projections(
        self, layer_idx: int, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the layer after layer_idx, if that one began with x [B, T, hidden] and
        attended to `attended` [B, H, T, D].
        """
        block, following = self.blocks[layer_idx], self.blocks[layer_idx + 1]
        assert isinstance(block, DecoderLayer) and isinstance(following, DecoderLayer)
        x = block.mlp(x + block.o_proj(attended.transpose(1, 2).flatten(2)))
        return following.project(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> next-token logits [..., vocab_size] through the tied
        embedding.
        """
        return F.linear(hidden, self.embedding.weight)

    def cmt_keys(self) -> list[Tensor] | None:
        """The context miss token's key of every layer, [Hkv, D], rotated to position -1; None for a
        model without one.

        The CMT passes through the layers with zero attention output, so the keys depend on weights
        alone (docs/appendix/method.md section 3).
        """
        if not self.config.cmt:
            return None
        x = self.embedding.weight[self.config.cmt_id][None, None]
        cos, sin = self.rope.angles(-1, 0, x)
        keys = []
        for block in self._layers():
            _, k, _ = block.project(x)
            keys.append(self.rope.rotate(k, cos, sin)[0, :, 0])
            x = block.mlp(x)
        return keys
