"""A model's own rotary positions, applied from outside."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.errors import InvalidWeights
from memstore.hf.seam import takes_layer_type

_UNSTEADY = {
    "dynamic": "its frequencies change with the length of the text (dynamic RoPE)",
    "longrope": "its frequencies change with the length of the text (LongRoPE)",
}
_TABLE = 4096  # positions to begin with


class ModelRotary:
    """Rotates queries and keys [.., T, D] of a layer as the model's own code does, attention
    scaling included, by tables of its cosines and sines.
    """

    def __init__(self, decoder: nn.Module, config: Any, turned: Sequence[bool]) -> None:
        """decoder: attached (memstore.hf.seam); turned: which layers have positions.

        Raises InvalidWeights for frequencies that change with the length.
        """
        rotary = cast(Any, decoder.rotary_emb).original
        for kind in _kinds(rotary):
            if kind in _UNSTEADY:
                raise InvalidWeights(
                    f"{config.model_type}: {_UNSTEADY[kind]}; what was stored under one length "
                    "would be wrong under another, so it cannot be given a memory"
                )
        self._rotary = rotary
        self._apply: Callable[..., tuple[Tensor, Tensor]] = sys.modules[
            type(decoder).__module__
        ].apply_rotary_pos_emb
        layers = len(cast(nn.ModuleList, decoder.layers))
        self._types: list[str | None] = (
            list(config.layer_types) if takes_layer_type(rotary) else [None] * layers
        )
        self._turned = turned
        self._tables: dict[tuple[str | None, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """x [.., T, D] to positions [T] (0 and above)."""
        if not self._turned[layer] or not x.numel():
            return x
        shape = x.shape
        x = x.reshape(1, -1, *shape[-2:])
        cos, sin = self._angles(self._types[layer], int(positions.max()) + 1, x)
        cos, sin = cos[:, positions], sin[:, positions]
        turned = cos.shape[-1]
        part = x[..., :turned]
        rotated = self._apply(part, part[:, :1], cos, sin)[0].to(x.dtype)
        if turned < shape[-1]:
            rotated = torch.cat((rotated, x[..., turned:]), -1)
        return rotated.view(shape)

    def _angles(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, n, d] of positions 0 .. n - 1, n >= reach."""
        key = (kind, x.dtype, x.device)
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < reach:
            size = max(_TABLE, 1 << (reach - 1).bit_length())
            positions = torch.arange(size, device=x.device)[None]
            given = (
                (x.new_zeros(1), positions) if kind is None else (x.new_zeros(1), positions, kind)
            )
            with torch.no_grad():
                table = self._tables[key] = self._rotary(*given)
        return table


def _kinds(rotary: Any) -> list[str]:
    kinds = getattr(rotary, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]
