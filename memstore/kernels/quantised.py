"""Slabs of quantised units: their layout, and what they decode to.

The arithmetic and the groups are those of the codecs int8 and int4 of memories on disk
(docs/storage.md): a value is zero + code * step, taken in float32 and rounded to the dtype of the
steps; K has a step a channel over GROUP tokens, V a step a token over GROUP channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # values that share a step


@dataclass(frozen=True)
class UnitScales:
    """Steps and zeros of slabs of codes; a last group may be smaller.

    k_steps, k_zeros: [S, ceil(block_size / GROUP), D]; v_steps, v_zeros: [S, block_size, ceil(D /
    GROUP)], in the KV
        dtype, contiguous. What stands at tokens beyond a slot's length is not used.
    bits: 8: the slabs of keys and of values are int8 codes [S, block_size, D]. 4: they are one and
    the same slab of
        uint8, given as both, K in the low four bits of a byte and V in the high four, each in two's
        complement.
    """

    k_steps: Tensor
    k_zeros: Tensor
    v_steps: Tensor
    v_zeros: Tensor
    bits: int

    def take(self, slots: Tensor) -> "UnitScales":
        """Those of some slots, int64 [n]."""
        k_steps, k_zeros, v_steps, v_zeros = (
            part.index_select(0, slots)
            for part in (self.k_steps, self.k_zeros, self.v_steps, self.v_zeros)
        )
        return UnitScales(k_steps, k_zeros, v_steps, v_zeros, self.bits)


def decode_units(
    keys: Tensor, values: Tensor, lengths: Tensor, scales: UnitScales
) -> tuple[Tensor, Tensor]:
    """K and V [n, block_size, D] in the KV dtype, zero behind lengths [n], of units [n, block_size,
    D] of codes.
    """
    _, size, dim = keys.shape
    if scales.bits == 4:
        signed = keys.view(torch.int8)
        keys, values = signed << 4 >> 4, signed >> 4
    token, channel = torch.arange(size, device=keys.device), torch.arange(dim, device=keys.device)
    rows, columns = token // GROUP, channel // GROUP
    k = scales.k_zeros[:, rows].float() + keys.float() * scales.k_steps[:, rows].float()
    v = (
        scales.v_zeros[:, :, columns].float()
        + values.float() * scales.v_steps[:, :, columns].float()
    )
    behind = (token >= lengths[:, None])[..., None]
    return k.masked_fill(behind, 0).to(scales.k_steps.dtype), v.masked_fill(behind, 0).to(
        scales.v_steps.dtype
    )
