"""Infini-attention (Munkhdalai et al., arXiv 2404.07143): every head keeps one matrix for all that
was before the segment, reads it by s(Q) and writes it by s(K), s = ELU + 1; a gate a head mixes
what it reads with attention inside the segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.kernels.products import accumulate, scores, weighted
from memstore.model.config import ModelConfig
from memstore.model.transformer import Transformer
from memstore.rivals.plain import NoPast


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

    def __init__(self, model: Transformer, batch: int, gates: Gates, update: str) -> None:
        """update: "linear" adds every value; "delta" only what the memory does not retrieve yet."""
        super().__init__(model, batch)
        self._gates, self._delta = gates, update == "delta"
        layers = model.config.num_layers
        self._matrices: list[Tensor | None] = [None] * layers
        self._norms: list[Tensor | None] = [None] * layers
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]  # s(K) of the open segment

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = super().attend(layer_idx, q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            self._keys[layer_idx].append(features(k))
            share = self._gates.share(layer_idx, q.shape[1])
            matrix, norm = self._matrices[layer_idx], self._norms[layer_idx]
            mixed = accumulate(local) * (1 - share)
            if matrix is not None and norm is not None:
                mixed = mixed + share * read(features(q), matrix, norm)
        return mixed.to(local.dtype)

    def _close(self) -> None:
        for layer, parts in enumerate(self._keys):
            if not parts:
                continue
            keys, values = torch.cat(parts, 2), accumulate(self._window.held(layer)[1])
            with torch.autocast(keys.device.type, enabled=False):
                matrix, norm = self._matrices[layer], self._norms[layer]
                if matrix is None or norm is None:
                    batch, heads, _, dim = keys.shape
                    matrix = keys.new_zeros(batch, heads, dim, dim)
                    norm = keys.new_zeros(batch, heads, dim)
                if self._delta:
                    values = values - read(keys, matrix, norm)
                self._matrices[layer] = matrix + keys.transpose(-1, -2) @ values
                self._norms[layer] = norm + keys.sum(2)
            parts.clear()

    def state(self) -> dict[str, Tensor]:
        opened = {f"keys.{n}": torch.cat(x, 2).detach() for n, x in enumerate(self._keys) if x}
        return super().state() | opened

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        for layer, parts in enumerate(self._keys):
            parts[:] = [state[name].clone() for name in (f"keys.{layer}",) if name in state]

    def _held(self) -> dict[str, Tensor]:
        both = {"matrices": self._matrices, "norms": self._norms}
        return {
            f"{name}.{n}": x for name, of in both.items() for n, x in enumerate(of) if x is not None
        }

    def _hold(self, held: dict[str, Tensor]) -> None:
        layers = range(len(self._matrices))
        self._matrices = [held.get(f"matrices.{layer}") for layer in layers]
        self._norms = [held.get(f"norms.{layer}") for layer in layers]


def features(x: Tensor) -> Tensor:
    """s(x) = ELU(x) + 1, in float32 at least."""
    return F.elu(accumulate(x)) + 1


def read(queries: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    """s(Q) M / (s(Q) z): queries s(Q) [B, H, T, D] of M [B, Hkv, D, D], z [B, Hkv, D]; zeros of an
    empty memory.
    """
    amount = scores(queries, norm[:, :, None])  # (B, H, T, 1)
    return weighted(queries, matrix) / amount.clamp(min=torch.finfo(amount.dtype).eps)
