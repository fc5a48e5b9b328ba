"""Infini-attention (Munkhdalai et al., arXiv 2404.07143): every head keeps one matrix for all that
was before the segment, reads it by s(Q) and writes it by s(K), s = ELU + 1, where it does not yet
retrieve the value (the delta rule); a gate a head mixes what it reads with attention inside the
segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines.past import NoPast
from memstore.kernels.reference import accumulate, scores, weighted
from memstore.model.landmark.transformer import ModelConfig, Transformer


class Gates(nn.Module):
    """beta of every layer and head; sigmoid(beta) is the memory's share."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(config.num_layers * config.num_heads))

    def share(self, layer_idx: int, heads: int) -> Tensor:
        """sigmoid(beta) [H, 1, 1] of a layer."""
        return self.gate[layer_idx * heads :][:heads].sigmoid()[:, None, None]


class InfiniPast(NoPast):
    """The matrices M [B, Hkv, D, D] and norms z [B, Hkv, D] of every layer, in float32 at least.

    M is what the segments before left: it is read before the segment is written, and gradients
    reach back through all segments that are read with gradients. Queries and keys meet it without
    position. An empty memory reads as zeros.
    """

    def __init__(self, model: Transformer, gates: Gates) -> None:
        super().__init__(model)
        self._gates = gates
        layers = model.config.num_layers
        self.held: list[tuple[Tensor, Tensor] | None] = [None] * layers  # M and z
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]  # s(K) of the open segment

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = super().attend(layer_idx, q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            self._keys[layer_idx].append(features(k))
            share = self._gates.share(layer_idx, q.shape[1])
            mixed = accumulate(local) * (1 - share)
            if (held := self.held[layer_idx]) is not None:
                mixed = mixed + share * read(features(q), *held)
        return mixed.to(local.dtype)

    def _close(self) -> None:
        for layer, parts in enumerate(self._keys):
            if not parts:
                continue
            keys, values = torch.cat(parts, 2), accumulate(self._window.held(layer)[1])
            with torch.autocast(keys.device.type, enabled=False):
                held = self.held[layer]
                if held is None:
                    batch, heads, _, dim = keys.shape
                    held = keys.new_zeros(batch, heads, dim, dim), keys.new_zeros(batch, heads, dim)
                matrix, norm = held
                values = values - read(keys, matrix, norm)
                self.held[layer] = matrix + keys.transpose(-1, -2) @ values, norm + keys.sum(2)
            parts.clear()

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for held in self.held for x in held or ())


def features(x: Tensor) -> Tensor:
    """s(x) = ELU(x) + 1, in float32 at least."""
    return F.elu(accumulate(x)) + 1


def read(queries: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    """s(Q) M / (s(Q) z): queries s(Q) [B, H, T, D] of M [B, Hkv, D, D], z [B, Hkv, D]; zeros of an
    empty memory.
    """
    amount = scores(queries, norm[:, :, None])  # (B, H, T, 1)
    return weighted(queries, matrix) / amount.clamp(min=torch.finfo(amount.dtype).eps)
