"""The calls that inference and training stand on; every engine and kernel is put under them without
changing a caller.

Each is defined by its reference in torch, whose signature and docstring it has; a Triton kernel of
the same signature stands in for it where memstore.kernels.dispatch says so.

A layer step runs `local_attention` first, because the gate must be known before anything is
searched; `landmark_topk` for the rows whose gate is open; and `memory_attention`, which adds the
retrieved blocks to the local result (softmax parts merge exactly, so the chunk is never scored
twice). Training reads whole windows by `grouped_softmax_attention`. Queries arrive scaled by
1/sqrt(D) and rotated; nothing here knows positions, documents or tiers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.kernels import (
    reference_grouped_softmax,
    reference_landmark_topk,
    reference_memory_attention,
)
from memstore.kernels.dispatch import by_triton, use_triton
from memstore.kernels.types import NEG, Hits, LocalAttention

__all__ = [
    "NEG", "Hits", "LocalAttention",
    "grouped_softmax_attention", "landmark_topk", "local_attention", "memory_attention",
]  # fmt: skip

_MOST_IN_REGISTERS = 64  # of top_k, that the search kernel keeps
# The kernel multiplies float32 without tensor cores: of 256 rows and 64K keys torch takes .29 of
# its time (H200), where all scores may be written.
_ROWS, _SCORES = 16, 1 << 30  # rows of float32; bytes of their scores, of which torch has a few

local_attention = reference_grouped_softmax.local_attention

memory_attention = by_triton(
    reference_memory_attention.memory_attention, "memstore.kernels.triton_memory_attention"
)


def _searched_by_kernel(
    q: Tensor, landmarks: Tensor, ranges: Sequence[tuple[int, int]], top_k: int, **_: object
) -> bool:
    wide = q.is_cuda and q.dtype == torch.float32 and q.shape[-2] > _ROWS
    keys = sum(end - start for start, end in ranges)
    return top_k <= _MOST_IN_REGISTERS and not (wide and q[..., 0].numel() * keys * 4 <= _SCORES)


landmark_topk = by_triton(
    reference_landmark_topk.landmark_topk,
    "memstore.kernels.triton_landmark_topk",
    fits=_searched_by_kernel,
)


def grouped_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    *,
    k_cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    triton: bool | None = None,
) -> Tensor:
    """Grouped softmax of whole windows, differentiable in q, k, v and k_cmt
    (docs/appendix/method.md sections 2, 3 and 7).

    q: [B, H, T, D] rotated and scaled; k, v: [B, Hkv, T, D]; k_cmt: [Hkv, D]; block_size as for
    `local_attention`.
    controlled: [B, T // (block_size + 1)] bool, blocks that share the gate's mass; None = all free.
    triton: True or False to choose the implementation; None for what `dispatch.use_triton` says.
    Memory grows with T in the Triton kernels, with T * T in torch, where blocks too large for a
    tile go (`triton_grouped_softmax_tile.supports`).
    Returns [B, H, T, D].
    """
    attend = reference_grouped_softmax.grouped_softmax_attention
    if use_triton(q, k, v) if triton is None else triton:
        from memstore.kernels import triton_grouped_softmax, triton_grouped_softmax_tile

        if triton_grouped_softmax_tile.supports(q, k, block_size):
            attend = triton_grouped_softmax.grouped_softmax_attention
    return attend(q, k, v, block_size, k_cmt=k_cmt, controlled=controlled)
