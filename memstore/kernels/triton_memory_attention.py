"""Attention to retrieved units in Triton, directly in their slabs: nothing is gathered, every slot
is read once.

The softmax over units needs only their landmark scores, so a program knows the final weights of its
units before it reads them. If there are too few rows to fill the device, several programs share a
row, each with some of its units, and `_sum_kernel` adds the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels.api import multiprocessors
from memstore.kernels.reference import NEG, LocalAttention

_NEG = tl.constexpr(NEG)


@triton.jit
def _unit(slab, slot, apart, length, token, channel, D):
    """A unit's keys or values [BLOCK_L, BLOCK_D], zeros behind its length. Slots are `apart`."""
    inside = (token < length)[:, None] & (channel < D)[None, :]
    at = slab + slot * apart + token[:, None] * D + channel[None, :]
    return tl.load(at, mask=inside, other=0)


@triton.jit
def _attend_kernel(
    q, k, v, lengths, slots, rotations, scores, local, gates, lses, out, mass, H, T, K, L, D, units,
    k_apart, v_apart, q_r, q_b, q_h, q_t, s_b, s_h, s_t, s_k, r_b, r_h, r_t, r_k, m_b, m_h, m_t,
    m_k,
    GATED: tl.constexpr, MASS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (rows B * H * T, splits): a row reads its units, `units` of them in each split."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h, t = row // (H * T), row // T % H, row % T
    unit, token, channel = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
    slots += b * s_b + h * s_h + t * s_t
    rotations += b * r_b + h * r_h + t * r_t
    present = tl.load(slots + unit * s_k, mask=unit < K, other=-1) >= 0
    logits = tl.load(
        scores + b * m_b + h * m_h + t * m_t + unit * m_k, mask=unit < K, other=0.0
    ).to(tl.float32)
    gate, lse = tl.load(gates + row).to(tl.float32), tl.load(lses + row).to(tl.float32)
    logits = tl.where(present, logits, _NEG)
    top = tl.max(logits, 0)
    e = tl.where(unit < K, tl.exp(logits - top), 0.0)
    total = tl.sum(e, 0)
    keep = 1.0  # of the local output
    if not GATED:
        gate = 1.0 / (1.0 + tl.exp(lse - top - tl.log(total)))
        keep = 1.0 - gate
    share = tl.where(present, e * (gate / total), 0.0)  # final weight of every unit
    if MASS and split == 0:
        tl.store(mass + row * K + unit, share, mask=unit < K)
    if split == 0:
        acc = keep * tl.load(local + row * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    else:
        acc = tl.zeros((BLOCK_D,), tl.float32)
    q += b * q_b + h * q_h + t * q_t
    for i in range(split * units, tl.minimum(K, (split + 1) * units)):
        weight = tl.sum(tl.where(unit == i, share, 0.0), 0)
        if weight != 0:  # no unit there, or a closed gate: nothing is read
            slot, turn = tl.load(slots + i * s_k), tl.load(rotations + i * r_k)
            length = tl.load(lengths + slot)
            query = tl.load(q + turn * q_r + channel, mask=channel < D, other=0.0).to(tl.float32)
            tile = _unit(k, slot, k_apart, length, token, channel, D)
            value = _unit(v, slot, v_apart, length, token, channel, D)  # on its way meanwhile
            s = tl.sum(tile.to(tl.float32) * query[None, :], 1)
            s = tl.where(token < length, s, tl.where(token < L, _NEG, float("-inf")))
            p = tl.exp(s - tl.max(s, 0))
            p *= weight / tl.sum(p, 0)
            acc += tl.sum(p[:, None] * value.to(tl.float32), 0)
    rows = tl.num_programs(0).to(tl.int64)
    tl.store(
        out + (split * rows + row) * D + channel, acc.to(out.dtype.element_ty), mask=channel < D
    )


@triton.jit
def _sum_kernel(parts, out, splits, size, BLOCK: tl.constexpr):
    """out [size] = the sum of parts [splits, size], in the order of the splits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        acc += tl.load(parts + split * size + at, mask=at < size, other=0.0)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < size)


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
) -> tuple[Tensor, Tensor | None]:
    """See `memstore.kernels.api.memory_attention`."""
    _, batch, heads, rows, dim = q.shape
    k = slots.shape[-1]
    output = torch.empty(batch, heads, rows, dim, dtype=local.output.dtype, device=q.device)
    mass = (
        torch.empty(batch, heads, rows, k, dtype=torch.float32, device=q.device)
        if return_mass
        else None
    )
    if rows == 0:
        return output, mass
    q = q if q.stride(-1) == 1 else q.contiguous()
    # several programs a row where that many leave processors without work
    wanted = max(1, 2 * multiprocessors(q.device) // (rows * batch * heads))
    units = triton.cdiv(max(1, k), min(max(1, k), wanted))
    splits = max(1, triton.cdiv(k, units))
    into = output if splits == 1 else output.new_empty((splits, *output.shape), dtype=torch.float32)
    tables = [x.expand(-1, -1, rows, -1) for x in (slots, rotations)]
    _attend_kernel[(rows * batch * heads, splits)](
        q, keys, values, lengths, slots, rotations, landmark_scores, local.output.contiguous(),
        local.gate.contiguous(), local.lse.contiguous(), into, output if mass is None else mass,
        heads, rows, k, keys.shape[1], dim, units, keys.stride(0), values.stride(0),
        *q.stride()[:4], *tables[0].stride(), *tables[1].stride(), *landmark_scores.stride(),
        GATED=gated, MASS=return_mass, BLOCK_K=triton.next_power_of_2(max(1, k)),
        BLOCK_L=triton.next_power_of_2(keys.shape[1]), BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        size = output.numel()
        _sum_kernel[(triton.cdiv(size, 1024),)](into, output, splits, size, BLOCK=1024)
    return output, mass
