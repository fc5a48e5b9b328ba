"""Grouped-softmax flash attention in Triton (docs/appendix/method.md sections 2, 3 and 7): forward
kernel, launcher, custom op.

Memory is linear in the length: beside the output two numbers a row. Every block's tile is read
once; before that, where blocks are controlled, their landmark keys alone, for Y.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels.triton_grouped_softmax_backward import backward_op
from memstore.kernels.triton_grouped_softmax_tile import (
    LOG2E,
    NEG,
    SIDE,
    add_mass,
    block_masses,
    kernel_constants,
    launch_options,
    load_blocks,
    load_controlled,
    load_rows,
    side_mass,
    store_rows,
    strides,
    width,
    with_rows,
)


@triton.jit
def _forward_tile(
    q, k, v, under, shift, own, offset, length, first, k_t, v_t, peak, total, acc,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of blocks in the running softmax."""
    keys, values = load_blocks(k, v, first, length, k_t, v_t, BLOCK, L, NB, D, DP, DIAGONAL)
    e, inner, mass = block_masses(
        q, keys, under, shift, own, offset, first, BLOCK, L, NB, DIAGONAL, PRECISION
    )
    new = tl.maximum(peak, tl.max(mass, 1))
    old, share = tl.exp2(peak - new), tl.exp2(mass - new[:, None])
    p = tl.reshape(e * (share / inner)[:, :, None], [q.shape[0], NB * L])
    acc = tl.dot(p.to(values.dtype), values, acc * old[:, None], input_precision=PRECISION)
    return new, total * old + tl.sum(share, 1), acc


@triton.jit
def _forward(
    q, k, v, cmt, controlled, out, lse, shifts, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
    o_h, o_t, length, heads, blocks,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out, lse and shifts of M rows of one head. The last rows come first: they take longest."""
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    stats = tl.program_id(1).to(tl.int64) * length
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    rows = begin + tl.arange(0, M)
    keep = rows < length
    own, offset = rows // (BLOCK + 1), rows % (BLOCK + 1)
    last = (tl.minimum(begin + M, length) - 1) // (BLOCK + 1)  # block of the last row
    kv_head = head // GROUP
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    queries = load_rows(q + batch * q_b + head * q_h, rows, keep, q_t, D, DP)
    peak = tl.full([M], NEG, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    shift = tl.zeros([M], tl.float32)

    if cmt is not None:
        dims = tl.arange(0, DP)
        cmt_key = tl.load(cmt + kv_head * D + dims, mask=dims < D, other=0.0).to(tl.float32)
        c = tl.sum(queries.to(tl.float32) * cmt_key[None, :], 1) * LOG2E
        y_peak, y_total = peak, total
        if controlled is not None:
            for first in range(0, last, SIDE):
                block = first + tl.arange(0, SIDE)
                keys = load_rows(k, block * (BLOCK + 1) + BLOCK, block < last, k_t, D, DP)
                mine = load_controlled(controlled, batch, blocks, first, SIDE)
                mass = side_mass(queries, keys, None, shift, mine, PRECISION)
                y_peak, y_total = add_mass(
                    y_peak, y_total, tl.where(block[None, :] < own[:, None], mass, NEG)
                )
        governed = y_peak > NEG / 2
        shift = tl.where(governed, c - y_peak - tl.log2(tl.where(governed, y_total, 1.0)), 0.0)
        peak, total = tl.where(governed, NEG, c), tl.where(governed, 0.0, 1.0)

    # from here on blocks may not be earlier than every row's own
    diagonal = begin // (BLOCK + 1) // NB * NB
    for first in range(0, diagonal, NB):
        mine = load_controlled(controlled, batch, blocks, first, NB)
        peak, total, acc = _forward_tile(
            queries, k, v, mine, shift, own, offset, length, first, k_t, v_t, peak, total, acc,
            BLOCK, L, NB, D, DP, False, PRECISION,
        )  # fmt: skip
    for first in range(diagonal, last + 1, NB):
        mine = load_controlled(controlled, batch, blocks, first, NB)
        peak, total, acc = _forward_tile(
            queries, k, v, mine, shift, own, offset, length, first, k_t, v_t, peak, total, acc,
            BLOCK, L, NB, D, DP, True, PRECISION,
        )  # fmt: skip

    store_rows(out + batch * o_b + head * o_h, rows, keep, o_t, acc / total[:, None], D, DP)
    tl.store(lse + stats + rows, peak + tl.log2(total), mask=keep)
    tl.store(shifts + stats + rows, shift, mask=keep)


@torch.library.custom_op("memstore::grouped_softmax", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, k_cmt: Tensor | None,
    controlled: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [B, H, T, D], and lse and shift [B, H, T], which the gradient needs."""
    batch, heads, length, _ = q.shape
    out, lse, shifts = _forward_outputs(q)
    constants = kernel_constants(q, k, block_size)
    options = launch_options(q, constants, forward=True)
    _forward[triton.cdiv(length, options["M"]), batch * heads](
        q, k, v, k_cmt, controlled, out, lse, shifts, *strides(q, k, v, out), length, heads,
        width(controlled), **constants, **options,
    )  # fmt: skip
    return out, lse, shifts


def _forward_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stats = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)]
    return torch.empty_like(q), stats[0], stats[1]


@forward_op.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_outputs(q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.block_size = inputs[3]
    ctx.save_for_backward(*output, *inputs[:3], *inputs[4:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    out, lse, shifts, q, k, v, *others = ctx.saved_tensors
    dq, dk, dv, dk_cmt = backward_op(do, out, lse, shifts, q, k, v, ctx.block_size, *others)
    return dq, dk, dv, None, None if others[0] is None else dk_cmt, None


forward_op.register_autograd(_gradients, setup_context=_save)


def grouped_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    *,
    k_cmt: Tensor | None = None,
    controlled: Tensor | None = None,
) -> Tensor:
    """See `memstore.kernels.api.grouped_softmax_attention`."""
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    return forward_op(
        with_rows(q.to(dtype)), with_rows(k.to(dtype)), with_rows(v.to(dtype)), block_size,
        None if k_cmt is None else k_cmt.to(dtype).contiguous(),
        None if controlled is None or k_cmt is None else controlled.contiguous(),
    )[0]  # fmt: skip
