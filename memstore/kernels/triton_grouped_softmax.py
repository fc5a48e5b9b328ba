"""Grouped-softmax flash attention in Triton (docs/appendix/method.md sections 2, 3 and 7): kernels
of the output and of the gradient, and the autograd function that launches them.

Memory is linear in the length: beside the output two numbers a row, lse and the shift c - Y of
controlled blocks. Forward reads every block's tile once; before that, where blocks are controlled,
their landmark keys alone, for Y.

Of the gradient, with a_ij the softmax inside a block, P_B a block's mass, dp_ij = dO_i.v_j and u_B
the sum of a_ij dp_ij over the block:
    earlier blocks     ds_ij = P_B a_ij (dp_ij - u_B),   dw_B = P_B (u_B - delta_i)
    own section        ds_ij = p_ij (dp_ij - delta_i),   delta_i = dO_i.O_i
    controlled blocks  dw_B = P_B (u_B - U_i),   U_i = the sum over them of P_B u_B / g_i
    the CMT            dc_i = g_i (U_i - delta_i),   U_i = 0 where nothing is controlled
where w_B is the landmark's score. The kernel by rows, which comes first, leaves delta and U to the
one by blocks. Nothing is added to atomically, so every run gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels.triton_grouped_softmax_tile import (
    LOG2E,
    NEG,
    SIDE,
    add_mass,
    block_masses,
    column_index,
    kernel_constants,
    launch_options,
    load_blocks,
    load_controlled,
    load_rows,
    logit_gradients,
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


@triton.jit
def _backward_q_tile(
    q, do, k, v, under, shift, lse, delta, own, offset, length, first, k_t, v_t, dq, gathered,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    keys, values = load_blocks(k, v, first, length, k_t, v_t, BLOCK, L, NB, D, DP, DIAGONAL)
    e, inner, mass = block_masses(
        q, keys, under, shift, own, offset, first, BLOCK, L, NB, DIAGONAL, PRECISION
    )
    ds, mean = logit_gradients(
        e / inner[:, :, None], tl.exp2(mass - lse[:, None]), do, values, under, delta, None, own,
        first,
        BLOCK, L, NB, DIAGONAL, PRECISION,
    )  # fmt: skip
    dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    if under is not None:
        gathered += tl.sum(tl.where(under[None, :], mean, 0.0), 1)
    return dq, gathered


@triton.jit
def _backward_q(
    q, k, v, do, out, cmt, controlled, lse, shifts, dq, deltas, group_deltas, dc, q_b, q_h, q_t,
    k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, d_h, d_t, length, heads, blocks,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of M rows of one head, and what the other gradients need of them: delta, U and dc. dq lies
    as out does.

    U is known only when all blocks have been seen. What it changes of dw is a sum over landmarks
    alone: at the end.
    """
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    stats = tl.program_id(1).to(tl.int64) * length
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    rows = begin + tl.arange(0, M)
    keep = rows < length
    own, offset = rows // (BLOCK + 1), rows % (BLOCK + 1)
    last = (tl.minimum(begin + M, length) - 1) // (BLOCK + 1)
    kv_head = head // GROUP
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    queries = load_rows(q + batch * q_b + head * q_h, rows, keep, q_t, D, DP)
    d_out = load_rows(do + batch * d_b + head * d_h, rows, keep, d_t, D, DP)
    output = load_rows(out + batch * o_b + head * o_h, rows, keep, o_t, D, DP)
    delta = tl.sum(d_out.to(tl.float32) * output.to(tl.float32), 1)
    at = stats + rows
    row_lse = tl.load(lse + at, mask=keep, other=0.0)
    shift = tl.load(shifts + at, mask=keep, other=0.0)
    acc = tl.zeros([M, DP], tl.float32)
    gathered = tl.zeros([M], tl.float32)  # sum of P_B u_B over controlled blocks
    gate = gathered
    if cmt is not None:
        dims = tl.arange(0, DP)
        cmt_key = tl.load(cmt + kv_head * D + dims, mask=dims < D, other=0.0).to(tl.float32)
        gate = tl.exp2(tl.sum(queries.to(tl.float32) * cmt_key[None, :], 1) * LOG2E - row_lse)

    diagonal = begin // (BLOCK + 1) // NB * NB
    for first in range(0, diagonal, NB):
        mine = load_controlled(controlled, batch, blocks, first, NB)
        acc, gathered = _backward_q_tile(
            queries, d_out, k, v, mine, shift, row_lse, delta, own, offset, length, first, k_t, v_t,
            acc, gathered,
            BLOCK, L, NB, D, DP, False, PRECISION,
        )  # fmt: skip
    for first in range(diagonal, last + 1, NB):
        mine = load_controlled(controlled, batch, blocks, first, NB)
        acc, gathered = _backward_q_tile(
            queries, d_out, k, v, mine, shift, row_lse, delta, own, offset, length, first, k_t, v_t,
            acc, gathered,
            BLOCK, L, NB, D, DP, True, PRECISION,
        )  # fmt: skip

    if cmt is not None:
        row_dc = gathered - gate * delta
        group_delta = tl.where(gate > 0.0, gathered / tl.where(gate > 0.0, gate, 1.0), delta)
        dims = tl.arange(0, DP)
        cmt_key = tl.load(cmt + kv_head * D + dims, mask=dims < D, other=0.0).to(tl.float32)
        acc += row_dc[:, None] * cmt_key[None, :]
        tl.store(dc + at, row_dc, mask=keep)
        tl.store(group_deltas + at, group_delta, mask=keep)
        if controlled is not None:
            for first in range(0, last, SIDE):
                block = first + tl.arange(0, SIDE)
                keys = load_rows(k, block * (BLOCK + 1) + BLOCK, block < last, k_t, D, DP)
                mine = load_controlled(controlled, batch, blocks, first, SIDE)
                mass = side_mass(queries, keys, mine, shift, mine, PRECISION)
                p = tl.exp2(tl.where(block[None, :] < own[:, None], mass, NEG) - row_lse[:, None])
                change = (p * (delta - group_delta)[:, None]).to(keys.dtype)
                acc = tl.dot(change, keys, acc, input_precision=PRECISION)

    tl.store(deltas + at, delta, mask=keep)
    store_rows(dq + batch * o_b + head * o_h, rows, keep, o_t, acc, D, DP)


@triton.jit
def _backward_kv_tile(
    q, do, lse, shifts, deltas, group_deltas, keys, values, under, length, begin, first, q_t, d_t,
    dk, dv,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = begin + tl.arange(0, M)
    keep = rows < length
    queries, d_out = load_rows(q, rows, keep, q_t, D, DP), load_rows(do, rows, keep, d_t, D, DP)
    row_lse = tl.load(lse + rows, mask=keep, other=-NEG)  # no weights where there is no row
    delta = tl.load(deltas + rows, mask=keep, other=0.0)
    shift, group_delta = row_lse, None
    if under is not None:
        shift = tl.load(shifts + rows, mask=keep, other=0.0)
        group_delta = tl.load(group_deltas + rows, mask=keep, other=0.0)
    own = rows // (BLOCK + 1)
    e, inner, mass = block_masses(
        queries, keys, under, shift, own, rows % (BLOCK + 1), first,
        BLOCK, L, NB, DIAGONAL, PRECISION,
    )  # fmt: skip
    a, share = e / inner[:, :, None], tl.exp2(mass - row_lse[:, None])
    p = tl.reshape(a * share[:, :, None], [M, NB * L])
    dv = tl.dot(tl.trans(p.to(d_out.dtype)), d_out, dv, input_precision=PRECISION)
    ds, _ = logit_gradients(
        a, share, d_out, values, under, delta, group_delta, own, first,
        BLOCK, L, NB, DIAGONAL, PRECISION,
    )  # fmt: skip
    dk = tl.dot(tl.trans(ds.to(queries.dtype)), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _backward_kv(
    q, k, v, do, controlled, lse, shifts, deltas, group_deltas, dk, dv, q_b, q_h, q_t, k_b, k_h,
    k_t, v_b, v_h, v_t, d_b, d_h, d_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, length, kv_heads, blocks,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of NB blocks of one KV head, from all later rows of its query heads."""
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    stats = tl.program_id(1).to(tl.int64) * GROUP * length
    stats_h = length
    first = tl.program_id(0) * NB
    begin = first * (BLOCK + 1)
    k += batch * k_b + kv_head * k_h
    index, keep = column_index(first, length, BLOCK, L, NB)
    keys = load_rows(k, index, keep, k_t, D, DP)
    values = load_rows(v + batch * v_b + kv_head * v_h, index, keep, v_t, D, DP)
    mine = load_controlled(controlled, batch, blocks, first, NB)
    dk_acc = tl.zeros([NB * L, DP], tl.float32)
    dv_acc = tl.zeros([NB * L, DP], tl.float32)
    q += batch * q_b + kv_head * GROUP * q_h
    do += batch * d_b + kv_head * GROUP * d_h
    # rows for which some block may not be earlier
    SPAN: tl.constexpr = (NB * (BLOCK + 1) + M - 1) // M * M
    tiles = tl.cdiv(tl.minimum(length - begin, SPAN), M)
    for step in range(GROUP * tiles):  # the heads of the group one after the other
        head, row = step // tiles, begin + step % tiles * M
        at = stats + head * stats_h
        dk_acc, dv_acc = _backward_kv_tile(
            q + head * q_h, do + head * d_h, lse + at, shifts + at, deltas + at, group_deltas + at,
            keys, values, mine, length, row, first, q_t, d_t, dk_acc, dv_acc,
            BLOCK, L, NB, M, D, DP, True, PRECISION,
        )  # fmt: skip
    tiles = tl.cdiv(tl.maximum(length - begin - SPAN, 0), M)
    for step in range(GROUP * tiles):
        head, row = step // tiles, begin + SPAN + step % tiles * M
        at = stats + head * stats_h
        dk_acc, dv_acc = _backward_kv_tile(
            q + head * q_h, do + head * d_h, lse + at, shifts + at, deltas + at, group_deltas + at,
            keys, values, mine, length, row, first, q_t, d_t, dk_acc, dv_acc,
            BLOCK, L, NB, M, D, DP, False, PRECISION,
        )  # fmt: skip
    dk += batch * dk_b + kv_head * dk_h
    dv += batch * dv_b + kv_head * dv_h
    store_rows(dk, index, keep, dk_t, dk_acc, D, DP)
    store_rows(dv, index, keep, dv_t, dv_acc, D, DP)


class _GroupedSoftmax(torch.autograd.Function):
    """Launches the kernels; saves lse and shift [B, H, T] for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, block_size: int, k_cmt: Tensor | None,
        controlled: Tensor | None,
    ) -> Tensor:  # fmt: skip
        batch, heads, length, _ = q.shape
        out = torch.empty_like(q)
        lse, shifts = (
            torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)
        )
        constants = kernel_constants(q, k, block_size)
        options = launch_options(q, constants, forward=True)
        _forward[triton.cdiv(length, options["M"]), batch * heads](
            q, k, v, k_cmt, controlled, out, lse, shifts, *strides(q, k, v, out), length, heads,
            width(controlled), **constants, **options,
        )  # fmt: skip
        ctx.block_size = block_size
        ctx.save_for_backward(out, lse, shifts, q, k, v, k_cmt, controlled)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, shifts, q, k, v, k_cmt, controlled = ctx.saved_tensors
        batch, heads, length, _ = q.shape
        kv_heads = k.shape[1]
        do = with_rows(do)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        deltas, group_deltas, dc = (torch.empty_like(lse) for _ in range(3))
        constants = kernel_constants(q, k, ctx.block_size)
        options = launch_options(q, constants)

        _backward_q[triton.cdiv(length, options["M"]), batch * heads](
            q, k, v, do, out, k_cmt, controlled, lse, shifts, dq, deltas, group_deltas, dc,
            *strides(q, k, v, out, do), length, heads, width(controlled), **constants, **options,
        )  # fmt: skip

        _backward_kv[triton.cdiv(length, constants["NB"] * (ctx.block_size + 1)), batch * kv_heads](
            q, k, v, do, controlled, lse, shifts, deltas, group_deltas, dk, dv,
            *strides(q, k, v, do, dk, dv), length, kv_heads, width(controlled), **constants,
            **options,
        )  # fmt: skip

        dk_cmt = None
        if k_cmt is not None:
            of_heads = torch.einsum("bht,bhtd->hd", dc, q.float())
            dk_cmt = of_heads.unflatten(0, (kv_heads, -1)).sum(1).to(k_cmt.dtype)
        return dq, dk, dv, None, dk_cmt, None


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
    output: Tensor = _GroupedSoftmax.apply(
        with_rows(q.to(dtype)), with_rows(k.to(dtype)), with_rows(v.to(dtype)), block_size,
        None if k_cmt is None else k_cmt.to(dtype).contiguous(),
        None if controlled is None or k_cmt is None else controlled.contiguous(),
    )  # fmt: skip
    return output
