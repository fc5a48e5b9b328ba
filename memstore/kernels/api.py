"""The calls that inference and training stand on; every engine and kernel is put under them without
changing a caller.

Which implementation runs, memstore.kernels.dispatch says.

A layer step runs `local_attention` first, because the gate must be known before anything is
searched; `landmark_topk` for the rows whose gate is open; and `memory_attention`, which adds the
retrieved blocks to the local result (softmax parts merge exactly, so the chunk is never scored
twice). Training reads whole windows by `grouped_softmax_attention`. Queries arrive scaled by
1/sqrt(D) and rotated; nothing here knows positions, documents or tiers.
"""

from collections.abc import Sequence

from torch import Tensor

from memstore.kernels import reference
from memstore.kernels.dispatch import use_triton
from memstore.kernels.quantised import UnitScales
from memstore.kernels.types import NEG, LocalAttention, Negatives, TopK

__all__ = [
    "NEG", "LocalAttention", "Negatives", "TopK", "UnitScales",
    "grouped_softmax_attention", "landmark_topk",
    "local_attention", "memory_attention",
]  # fmt: skip

_MOST_IN_REGISTERS = 64  # of top_k, that the search kernel keeps


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    *,
    k_cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    last_length: int | None = None,
) -> LocalAttention:
    """Grouped softmax of the last T positions of a run of blocks over that run (docs/method.md
    sections 2 and 3).

    q: [B, H, T, D] rotated and scaled; the rows are the last T of the S positions. k, v: [B, Hkv,
    S, D]; position s is the landmark of its block where s % (block_size + 1) == block_size; a
    partial
        last block has none. H is a multiple of Hkv.
    k_cmt: [Hkv, D], the context miss token's key rotated to position -1; None for a model without
    one. controlled: [B, S // (block_size + 1)] bool, blocks that share the gate's mass (training);
    None = all free
        (inference).
    last_length: content tokens of the last block that are real, the rest being padding (a
    document's closed last
        block).
    """
    return reference.local_attention(
        q, k, v, block_size, k_cmt=k_cmt, controlled=controlled, last_length=last_length
    )


def landmark_topk(
    q: Tensor,
    landmarks: Tensor,
    ranges: Sequence[tuple[int, int]],
    top_k: int,
    *,
    return_lse: bool = False,
    kv_heads: Sequence[int] | None = None,
    bias: Tensor | None = None,
) -> TopK:
    """The top_k landmark keys by inner product for every query row, within ranges of rows.

    q: [H, T, D] rotated and scaled. landmarks: [Hkv, N, D], each query head scores its KV head's
    keys. ranges: (start, end) rows, oldest first, disjoint. Ties go to the newer row (later in
    `ranges`). kv_heads: the KV heads whose rows are wanted (None = all): the keys of the others are
    not read, and their rows find
        nothing.
    bias: [n] float32, added to the scores of the n rows of `ranges`, in their order; None = none.
    Returns TopK with exactly top_k columns, best first, scores in float32.
    """
    if top_k <= _MOST_IN_REGISTERS and use_triton(q, landmarks):
        from memstore.kernels import landmark_topk as kernel

        return kernel.landmark_topk(
            q, landmarks, ranges, top_k, return_lse=return_lse, kv_heads=kv_heads, bias=bias
        )
    return reference.landmark_topk(
        q, landmarks, ranges, top_k, return_lse=return_lse, kv_heads=kv_heads, bias=bias
    )


def memory_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    rotations: Tensor,
    landmark_scores: Tensor,
    local: LocalAttention,
    *,
    gated: bool,
    return_mass: bool = False,
    scales: UnitScales | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Add the retrieved blocks to a chunk's local attention (docs/method.md sections 2 to 4).

    q: [R, B, H, T, D], the scaled queries under R rotations: one a slot position, or one for all
    old blocks. keys, values: [S, block_size, D] slabs of unit slots, in any float dtype, each slot
    contiguous; lengths: [S] int64,
        valid content tokens of a slot.
    slots: [B, H, T or 1, K] int64 slot of each selected unit, -1 for none; a 1 shares the selection
    among all rows. rotations: like slots, the index into q's first axis under which that unit is
    scored. landmark_scores: [B, H, T, K] float, log-mass of each unit before the softmax over
    units; ignored where slots is -1. local: what `local_attention` gave for the same rows; with
    `gated` its gate is the memory's mass (0 closes a row;
        rows with no unit keep their missing mass); without, memory and chunk share one softmax
        through `local.lse`.
    scales: of slabs that hold codes instead of numbers (memstore.kernels.quantised); None for slabs
    of numbers. Returns output [B, H, T, D] and, if asked, the attention mass of each unit [B, H, T,
    K] (else None).
    """
    if use_triton(q, keys):
        from memstore.kernels import memory_attention as kernel

        attend = kernel.memory_attention
    else:
        attend = reference.memory_attention
    return attend(
        q,
        keys,
        values,
        lengths,
        slots,
        rotations,
        landmark_scores,
        local,
        gated=gated,
        return_mass=return_mass,
        scales=scales,
    )


def grouped_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    *,
    k_cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    negatives: Negatives | None = None,
    triton: bool | None = None,
) -> Tensor:
    """Grouped softmax of whole windows, differentiable in q, k, v, k_cmt and the negatives
    (docs/method.md 2, 3 and 7).

    q: [B, H, T, D] rotated and scaled; k, v: [B, Hkv, T, D]; k_cmt: [Hkv, D]; block_size as for
    `local_attention`. controlled: [B, T // (block_size + 1)] bool, blocks that share the gate's
    mass; None = all free. Of packed documents
        [1, n], the complete blocks of all of them in their order.
    cu_seqlens: [documents + 1] int32, where packed documents start and the last one ends (B is 1):
    a row sees its own
        document, and blocks are counted from its start. Rows past the last are zeros.
    negatives: blocks of one token each that compete with every row's earlier blocks. triton: True
    or False to choose the implementation; None for what `dispatch.use_triton` says. Memory grows
    with T in
        the Triton kernels, with T * T in torch, where blocks too large for a tile go
        (`grouped_softmax_tile.supports`).
    Returns [B, H, T, D]. Raises ValueError for packed documents in a batch of more than one.
    """
    if cu_seqlens is not None and len(q) != 1:
        raise ValueError(f"packed documents lie in a batch of 1, not of {len(q)}")
    attend = reference.grouped_softmax_attention
    if use_triton(q, k, v) if triton is None else triton:
        from memstore.kernels import grouped_softmax, grouped_softmax_tile

        if grouped_softmax_tile.supports(q, k, block_size):
            attend = grouped_softmax.grouped_softmax_attention
    return attend(
        q,
        k,
        v,
        block_size,
        k_cmt=k_cmt,
        controlled=controlled,
        cu_seqlens=cu_seqlens,
        negatives=negatives,
    )
