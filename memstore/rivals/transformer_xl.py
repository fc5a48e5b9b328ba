"""Transformer-XL (Dai et al., arXiv 1901.02860): every layer also sees the states that it began the
segments before with, without a gradient into them, so that its reach grows with depth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.kernels.products import accumulate, scores, weighted
from memstore.model.config import ModelConfig
from memstore.model.transformer import DecoderLayer, Transformer
from memstore.rivals.past import Past, causal_attention, visible

_BASE = 10_000.0  # of the sinusoids


class CachedPast(Past):
    """With rotary positions: the cache stands before the segment, and all are rotated by their true
    distance.

    What is kept are a layer's input states: keys and values are projected from them anew in each
    segment, so that the projections, and nothing behind them, learn from the cache.
    """

    rotary = True

    def __init__(self, model: Transformer, batch: int, cache: int) -> None:
        """cache: tokens kept before the segment."""
        super().__init__(model, batch)
        self.cache = cache
        layers = model.config.num_layers
        self._states: list[Tensor | None] = [None] * layers  # cached, (B, m, hidden)
        self._open: list[list[Tensor]] = [[] for _ in range(layers)]  # of the segment's tokens

    def enter(self, layer_idx: int, x: Tensor) -> None:
        if self.cache:
            self._open[layer_idx].append(x.detach())

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._scaled(layer_idx, q, k)
        cached = self._states[layer_idx]
        if cached is not None and not self._window.size(layer_idx):
            block = self.model.blocks[layer_idx]
            assert isinstance(block, DecoderLayer)
            old_k, old_v = block.keys_values(cached)
            _, old_k = self._scaled(layer_idx, q[:, :, :0], old_k)
            self._window.append(layer_idx, old_k, old_v, rotate=self.rotary)
        self._count(q.shape[2], self._window.size(layer_idx))
        self._window.append(layer_idx, k, v, rotate=self.rotary)
        return self._attended(layer_idx, q)

    def _scaled(self, layer_idx: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * q.shape[-1] ** -0.5, k

    def _attended(self, layer_idx: int, q: Tensor) -> Tensor:
        return causal_attention(self._window.turned(layer_idx, q), *self._window.held(layer_idx))

    def _close(self) -> None:
        for layer, parts in enumerate(self._open):
            if parts:
                old = self._states[layer]
                kept = torch.cat(parts if old is None else [old, *parts], 1)
                self._states[layer] = kept[:, max(0, kept.shape[1] - self.cache) :]
                parts.clear()

    def _held(self) -> dict[str, Tensor]:
        states = {f"states.{n}": x for n, x in enumerate(self._states) if x is not None}
        return states

    def state(self) -> dict[str, Tensor]:
        opened = {f"open.{n}": torch.cat(x, 1) for n, x in enumerate(self._open) if x}
        return super().state() | opened

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        for layer, parts in enumerate(self._open):
            parts[:] = [state[name].clone() for name in (f"open.{layer}",) if name in state]

    def _hold(self, held: dict[str, Tensor]) -> None:
        self._states = [held.get(f"states.{layer}") for layer in range(len(self._states))]


class RelativePositions(nn.Module):
    """What the paper's positions learn in one layer: a projection of the sinusoids, and the biases
    u and v of its queries.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, dim = config.num_heads, config.head_dim
        self.r_proj = nn.Linear(config.hidden_size, heads * dim, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, 1, dim))
        self.v = nn.Parameter(torch.zeros(heads, 1, dim))


class RelativePast(CachedPast):
    """With the paper's own positions: score = ((q + u)·k + (q + v)·r_{i-j}) / sqrt(d), r a
    projection of the sinusoids of the distance.
    """

    rotary = False

    def __init__(
        self, model: Transformer, batch: int, cache: int, positions: nn.ModuleList
    ) -> None:
        """positions: RelativePositions of every layer."""
        super().__init__(model, batch, cache)
        self._positions = positions

    def _scaled(self, layer_idx: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _attended(self, layer_idx: int, q: Tensor) -> Tensor:
        keys, values = self._window.held(layer_idx)
        learned = self._positions[layer_idx]
        assert isinstance(learned, RelativePositions)
        rows, total, dim = q.shape[2], keys.shape[2], q.shape[3]
        distances = torch.arange(total - 1, -1, -1, device=q.device)
        r = learned.r_proj(sinusoids(distances, self.model.config.hidden_size).to(q.dtype))
        r = r.view(total, -1, dim).permute(1, 2, 0)  # (H, D, S), the farthest first
        by_content = scores(q + learned.u.to(q.dtype), keys)
        by_distance = relative_shift((q + learned.v.to(q.dtype)) @ r)
        s = accumulate(by_content + by_distance) * dim**-0.5
        s = s.masked_fill(~visible(rows, total, q.device), -torch.inf)
        return weighted(s.softmax(-1), values)


def sinusoids(distances: Tensor, size: int) -> Tensor:
    """[n] -> [n, size]: sines, then cosines, of the distances at size / 2 frequencies."""
    rates = _BASE ** -(torch.arange(0, size, 2, device=distances.device).double() / size)
    turns = distances.double()[:, None] * rates
    return torch.cat([turns.sin(), turns.cos()], -1)


def relative_shift(x: Tensor) -> Tensor:
    """x [.., T, S], whose column c is of the distance S - 1 - c, moved so that row i, which is
    position S - T + i, has in column j what is of its distance to j; beyond itself anything.
    """
    rows, total = x.shape[-2:]
    moved = F.pad(x, (0, rows)).flatten(-2)[..., rows - 1 :]
    return moved.unfold(-1, total, total + rows - 1)[..., :rows, :]
