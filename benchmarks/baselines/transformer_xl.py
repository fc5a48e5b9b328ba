"""Transformer-XL (Dai et al., arXiv 1901.02860) with rotary positions: every layer also sees the
states that it began the segments before with, without a gradient into them, so that its reach grows
with depth.
"""

import torch
from torch import Tensor

from benchmarks.baselines.past import Past, causal_attention
from memstore.model.landmark.transformer import DecoderLayer, Transformer


class CachedPast(Past):
    """The cache comes before the segment, and keys are rotated by their true distances.

    It keeps the input states of each layer and projects keys and values from them in each segment.
    So the projections learn from the cache, and the layers below do not.
    """

    def __init__(self, model: Transformer, cache: int) -> None:
        """cache: tokens kept before the segment."""
        super().__init__(model)
        self.cache = cache
        layers = model.config.num_layers
        self.states: list[Tensor | None] = [None] * layers  # cached, (B, m, hidden)
        self._open: list[list[Tensor]] = [[] for _ in range(layers)]  # of the segment's tokens

    def enter(self, layer_idx: int, x: Tensor) -> None:
        if self.cache:
            self._open[layer_idx].append(x.detach())

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._scaled(layer_idx, q, k)
        cached = self.states[layer_idx]
        if cached is not None and not self._window.size(layer_idx):
            block = self.model.blocks[layer_idx]
            assert isinstance(block, DecoderLayer)
            _, old_k, old_v = block.project(cached)
            _, old_k = self._scaled(layer_idx, q[:, :, :0], old_k)
            self._window.append(layer_idx, old_k, old_v)
        self._count(q.shape[2], self._window.size(layer_idx))
        self._window.append(layer_idx, k, v)
        return causal_attention(self._window.turned(layer_idx, q), *self._window.held(layer_idx))

    def _scaled(self, layer_idx: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * q.shape[-1] ** -0.5, k

    def _close(self) -> None:
        for layer, parts in enumerate(self._open):
            if parts:
                old = self.states[layer]
                kept = torch.cat(parts if old is None else [old, *parts], 1)
                self.states[layer] = kept[:, max(0, kept.shape[1] - self.cache) :]
                parts.clear()

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.states if x is not None)
