"""Rotary positions (RoPE)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Positions:
    """Positions [T] on a device, each below `reach`. All layers of a forward pass share them and
    their angles; reading them on the CPU would wait for the device.
    """

    at: Tensor
    reach: int
    angles: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by who asks


class Rope:
    """Rotates the last axis of queries and keys by integer positions, which may be negative (the
    CMT is at -1).

    `interleaved` pairs dimensions (0,1),(2,3)..; otherwise (0,D/2),(1,D/2+1).. as Hugging Face
    models do. Rotations compose: a query at p against a key at r equals the query at p - r against
    the unrotated key.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, interleaved: bool = False) -> None:
        self.interleaved = interleaved
        # Rounded to float32 as the published implementation has them; angles, cosines and sines are
        # then taken in float64.
        self.frequencies = (
            base ** (-torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        ).double()
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor, int]] = {}

    def _table(self, reach: int, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Angles, as from `angles`, of positions -zero .. zero for rotating x; and zero, at least
        reach.
        """
        key = (torch.float64 if x.dtype == torch.float64 else torch.float32, x.device)
        table = self._tables.get(key)
        if table is None or table[2] < reach:
            zero = max(1024, 1 << reach.bit_length())
            grid = torch.arange(-zero, zero + 1, dtype=torch.float64, device="cpu")
            turns = grid[:, None] * self.frequencies
            # values of the first and the second dimension of every pair, as the dimensions follow
            halves = (turns.cos(), turns.cos()), (-turns.sin(), turns.sin())
            cos, sin = (
                torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
                for both in halves
            )
            table = self._tables[key] = (cos.to(*key[::-1]), sin.to(*key[::-1]), zero)
        return table

    def angles(self, start: int, end: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [end - start, D] for rotating x to positions start .. end - 1.

        Only the device and precision of x are used. sin is negated in the first dimension of each
        pair, as `rotate` expects.
        """
        cos, sin, zero = self._table(max(abs(start), abs(end)), x)
        return cos[start + zero : end + zero], sin[start + zero : end + zero]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., T, D] rotated to positions [T] (or any shape that broadcasts against x's axes but
        the last).
        """
        return self.rotate(x, *self.angles_at(positions, x))

    def angles_at(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D] for rotating tensors of x's device and precision to positions [...].

        This waits for the device: call it once, not once for each layer.
        """
        reach = int(positions.abs().max()) if positions.numel() else 0
        cos, sin, zero = self._table(reach, x)
        return cos[positions + zero], sin[positions + zero]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] rotated by `angles` that broadcast against it; the result has x's dtype."""
        return (x * cos + self._partners(x) * sin).to(x.dtype)

    def _partners(self, x: Tensor) -> Tensor:
        """For every dimension, the other dimension of its pair."""
        if self.interleaved:
            return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x.roll(x.shape[-1] // 2, -1)
