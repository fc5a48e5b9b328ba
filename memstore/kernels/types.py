"""What kernels take and return besides tensors: shared by the calls of api.py and every
implementation under them.
"""

from dataclasses import dataclass

from torch import Tensor

NEG = -1e30
"""Stands for minus infinity: large enough to vanish in float32, finite so that a fully masked group
gives no NaN.
"""


@dataclass(frozen=True)
class LocalAttention:
    """Attention over the chunk alone, before any memory is read (docs/appendix/method.md sections 2
    and 3).

    output: [B, H, T, D], weights times values; the weights of a row sum to 1 - gate. gate: [B, H,
    T], the context miss token's share g, or zeros where there is none. lse: [B, H, T], log of the
    softmax's denominator (the CMT included); NEG + small for rows that see nothing.
    """

    output: Tensor
    gate: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Hits:
    """The best candidates of each query row, best first.

    scores: [H, T, top_k] float32, NEG where there are fewer candidates.
    candidates: [H, T, top_k] int64, which of the candidates (0 = the oldest), -1 where there are
    fewer.
    lse: [H, T] float32, logsumexp over every candidate (not only the best), or None if it was not
    asked for.
    """

    scores: Tensor
    candidates: Tensor
    lse: Tensor | None
