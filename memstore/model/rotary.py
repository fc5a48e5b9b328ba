"""Rotary positions (RoPE), and where memory's blocks stand: stingy slots or one fixed distance (docs/method.md section 4)."""

from dataclasses import dataclass

import torch
from torch import Tensor


class Rope:
    """Rotates the last axis of queries and keys by integer positions, which may be negative (the CMT stands at -1).

    `interleaved` pairs dimensions (0,1),(2,3)..; otherwise (0,D/2),(1,D/2+1).. as Hugging Face models do. Rotations compose:
    a query at p against a key at r equals the query at p - r against the key unrotated.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, interleaved: bool = False) -> None:
        self.interleaved = interleaved
        # Rounded to float32 as the published implementation has them; angles, cosines and sines are then taken in float64.
        self.frequencies = (base ** (-torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)).double()
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor, int]] = {}

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D/2] of the angles at integer positions [...]."""
        key = (dtype, positions.device)
        reach = int(positions.abs().max()) + 1 if positions.numel() else 1
        table = self._tables.get(key)
        if table is None or table[2] < reach:
            reach = max(1024, 1 << (reach - 1).bit_length())
            grid = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
            angles = grid[:, None] * self.frequencies
            table = (angles.cos().to(*key[::-1]), angles.sin().to(*key[::-1]), reach)
            self._tables[key] = table
        cos, sin, reach = table
        return cos[positions + reach], sin[positions + reach]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., T, D] rotated to positions [T] (or any shape that broadcasts against x's axes but the last)."""
        cos, sin = self.cos_sin(positions, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return rotate(x, cos, sin, self.interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] rotated by angles given as cos and sin [..., D/2]; the result has x's dtype."""
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Prefix:
    """The slots before a chunk for a memory of `blocks` blocks, the last `recent` of them recent (docs/method.md section 4).

    size: prefix slots of block_size + 1 positions each; the chunk starts behind them. Stingy mapping gives old blocks slots from
    the left; a fixed distance gives them none. Chosen recent blocks take the right-most slots in order.
    """

    blocks: int
    recent: int
    size: int

    @classmethod
    def of(cls, blocks: int, own: int, top_k: int, fixed: bool) -> "Prefix":
        """The prefix for `blocks` blocks of which the last `own` are the session's own."""
        recent = min(own, top_k)
        return cls(blocks, recent, recent if fixed else min(blocks, top_k + 1))

    @property
    def old(self) -> int:
        """How many blocks are old."""
        return self.blocks - self.recent
