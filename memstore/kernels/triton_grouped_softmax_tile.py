"""Tiles of the grouped-softmax kernels: how windows of landmark blocks are cut, and what one tile
computes.

A tile of keys holds whole landmark blocks, each with its landmark padded to a power of two, so
that blocks of 31 or 63 tokens fill a tile. A block's inner softmax never leaves a tile, and one
online softmax runs over the blocks' log-masses. All logarithms here are to base 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NEG = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
SIDE = tl.constexpr(64)  # landmarks in a tile of nothing else


@triton.jit
def load_rows(base, index, keep, stride, D: tl.constexpr, DP: tl.constexpr):
    """Rows [.., DP] of a matrix with D columns, zeros where `keep` is False (None: all True)."""
    dims = tl.arange(0, DP)
    at = base + index[:, None] * stride + dims[None, :]
    if keep is not None:
        mask = keep[:, None] & (dims < D)[None, :] if DP != D else keep[:, None]
        return tl.load(at, mask=mask, other=0.0)
    elif DP != D:
        return tl.load(at, mask=(dims < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, index, keep, stride, x, D: tl.constexpr, DP: tl.constexpr):
    dims = tl.arange(0, DP)
    mask = keep[:, None] & (dims < D)[None, :]
    tl.store(base + index[:, None] * stride + dims[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def column_index(first, length, BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr):
    """Rows of a tile's NB * L columns inside their sequence, and which of them exist."""
    column = tl.arange(0, NB * L)
    index = (first + column // L) * (BLOCK + 1) + column % L
    return index, (column % L < BLOCK + 1) & (index < length)


@triton.jit
def load_blocks(
    k, v, first, length, k_t, v_t,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile of blocks; blocks off the diagonal are complete."""
    index, keep = column_index(first, length, BLOCK, L, NB)
    if not DIAGONAL and L == BLOCK + 1:
        keep = None
    return load_rows(k, index, keep, k_t, D, DP), load_rows(v, index, keep, v_t, D, DP)


@triton.jit
def block_masses(
    q, k, under, shift, own, offset, first,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For a tile: exp2 of content logits minus their block's maximum [M, NB, L], the sums [M, NB]
    and log-masses [M, NB].

    under: [NB] controlled blocks or None; shift: [M] added to their log-mass.
    own, offset: [M] block of each row, and its position in the block.
    DIAGONAL: whether some block may be a row's own or a later one.
    """
    M: tl.constexpr = q.shape[0]
    column = tl.arange(0, L)[None, None, :]
    # scaled before anything is masked: a GPU fuses a product with a difference into one operation,
    # which of NEG leaves its rounding, some 1e22, in place of 0
    s = tl.reshape(tl.dot(q, tl.trans(k), input_precision=PRECISION) * LOG2E, [M, NB, L])
    mass = tl.sum(tl.where(column == BLOCK, s, 0.0), 2)
    if under is not None:
        mass += tl.where(under[None, :], shift[:, None], 0.0)
    if DIAGONAL:
        block = first + tl.arange(0, NB)
        earlier = block[None, :] < own[:, None]
        mine = block[None, :] == own[:, None]
        visible = tl.where(
            earlier, BLOCK, tl.where(mine, tl.minimum(offset + 1, BLOCK)[:, None], 0)
        )
        s = tl.where(column < visible[:, :, None], s, NEG)
    else:
        s = tl.where(column < BLOCK, s, NEG)
    peak = tl.max(s, 2)
    e = tl.exp2(s - peak[:, :, None])
    total = tl.sum(e, 2)
    if DIAGONAL:
        mass = tl.where(earlier, mass, tl.where(mine, peak + tl.log2(total), NEG))
    return e, total, mass


@triton.jit
def logit_gradients(
    a, share, do, values, under, delta, group_delta, own, first,
    BLOCK: tl.constexpr, L: tl.constexpr, NB: tl.constexpr, DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's logits and landmarks [M, NB * L], and P_B u_B [M, NB].

    a: [M, NB, L] softmax inside blocks; share: [M, NB] their mass P. group_delta: U of the rows;
    None while it is unknown: then delta is used instead.
    """
    M: tl.constexpr = do.shape[0]
    dp = tl.reshape(tl.dot(do, tl.trans(values), input_precision=PRECISION), [M, NB, L])
    u = tl.sum(a * dp, 2)
    of_all = delta[:, None]
    if group_delta is not None and under is not None:
        of_all = tl.where(under[None, :], group_delta[:, None], of_all)
    dw = share * (u - of_all)
    base = u
    mean = share * u
    if DIAGONAL:
        earlier = (first + tl.arange(0, NB))[None, :] < own[:, None]
        dw = tl.where(earlier, dw, 0.0)
        base = tl.where(earlier, u, delta[:, None])
        mean = tl.where(earlier, mean, 0.0)
    ds = a * (share[:, :, None] * (dp - base[:, :, None]))
    ds = tl.where(tl.arange(0, L)[None, None, :] == BLOCK, dw[:, :, None], ds)
    return tl.reshape(ds, [M, NB * L]), mean


@triton.jit
def side_mass(q, k, under, shift, keep, PRECISION: tl.constexpr):
    """Log-masses [M, SIDE] of landmarks alone."""
    mass = tl.dot(q, tl.trans(k), input_precision=PRECISION) * LOG2E
    if under is not None:
        mass += tl.where(under[None, :], shift[:, None], 0.0)
    return tl.where(keep[None, :], mass, NEG)


@triton.jit
def add_mass(y_peak, y_total, mass):
    """One more tile of log-masses in a running log of a sum."""
    peak = tl.maximum(y_peak, tl.max(mass, 1))
    return peak, y_total * tl.exp2(y_peak - peak) + tl.sum(tl.exp2(mass - peak[:, None]), 1)


@triton.jit
def load_controlled(controlled, batch, blocks, first, count: tl.constexpr):
    """Which of `count` blocks of a sequence are controlled, or None."""
    if controlled is None:
        return  # None, which a Triton function cannot say
    else:
        block = first + tl.arange(0, count)
        at = controlled + batch * blocks + block
        return tl.load(at, mask=block < blocks, other=0) != 0


def kernel_constants(q: Tensor, k: Tensor, block_size: int) -> dict[str, Any]:
    """Compile-time constants of the kernels: blocks of BLOCK tokens and a landmark in L columns, NB
    of them in a tile; D dimensions in DP columns.
    """
    size, dim = triton.next_power_of_2(block_size + 1), q.shape[3]
    return {
        "BLOCK": block_size,
        "L": size,
        "NB": max(1, 64 // size),
        "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)),
        "GROUP": q.shape[1] // k.shape[1],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def launch_options(
    q: Tensor, constants: dict[str, Any], *, forward: bool = False
) -> dict[str, int]:
    """Rows, warps and pipeline stages of a program.

    Chosen by what ptxas reports of registers and shared memory on sm_90: 128 rows keep the reading
    of keys below what the L2 cache gives, and with 8 warps little is spilled up to D = 128.
    """
    if q.dtype == torch.float32:
        return {"M": 32, "num_warps": 8, "num_stages": 1}
    tile = _tile_bytes(q, constants)
    if tile <= 1 << 14:
        return {"M": 128, "num_warps": 8, "num_stages": 3 if forward else 2}
    small = tile <= 1 << 15
    return {"M": 128 if forward and small else 64, "num_warps": 8, "num_stages": 2 if small else 1}


def _tile_bytes(q: Tensor, constants: dict[str, Any]) -> int:
    return constants["NB"] * constants["L"] * constants["DP"] * q.element_size()


def supports(q: Tensor, k: Tensor, block_size: int) -> bool:
    """Whether tiles of keys and values fit shared memory, in a dtype that Triton multiplies."""
    fits = q.shape[3] <= 256 and _tile_bytes(q, kernel_constants(q, k, block_size)) <= 1 << 16
    return fits and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, head and row of [B, H, T, D] tensors."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def width(controlled: Tensor | None) -> int:
    """Blocks of a sequence in `controlled`."""
    return 0 if controlled is None else controlled.shape[1]


def with_rows(x: Tensor) -> Tensor:
    """A copy or view of x whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
