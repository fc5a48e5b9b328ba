"""Search over landmark keys in Triton: programs keep the best of each query row, and scores are
never written to memory.

`_partial_kernel` keeps the best of a share of the candidates for a tile of query rows of one KV
head (of all its query heads); `_merge_kernel` joins the shares. A score and the candidate's number
are one int64: the score's bits, mapped to integers of the same order, then the number, so that a
maximum prefers the newer of equals.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels import reference
from memstore.kernels.api import multiprocessors
from memstore.kernels.reference import NEG, Hits

_NEG = tl.constexpr(NEG)
_NONE = tl.constexpr(-(1 << 63))  # no candidate, and so is every number below _FIRST
_FIRST = tl.constexpr(-(1 << 63) + (1 << 32))
_SHARE = 512  # candidates that are worth a program of their own
_MOST = 4096  # partial results of a row that are merged at once


@triton.jit
def _ordered(bits):
    """The bits of float32 numbers as int32 of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _partial_kernel(
    q, keys, bias, table, firsts, heads, best_out, lse_out, T, D, share, total, rows, q_h, q_t, k_h,
    k_n,
    LSE: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of a KV head's GROUP * T query rows, shares of the candidates, KV heads that are
    searched).
    """
    first, part = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    head = tl.load(heads + tl.program_id(2)).to(tl.int64)
    m, n = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    slot, channel = tl.arange(0, TOP), tl.arange(0, BLOCK_D)
    here = m < GROUP * T
    q += head * GROUP * q_h
    keys += head * k_h
    if DOT:
        query = tl.load(
            q + (m // T * q_h + m % T * q_t)[:, None] + channel[None, :],
            mask=here[:, None] & (channel < D)[None, :], other=0.0,
        )  # fmt: skip
    # distinct, so that one goes at a time
    best = tl.zeros((BLOCK_M, TOP), tl.int64) + (slot.to(tl.int64) + _NONE)[None, :]
    top = tl.full((BLOCK_M,), _NEG, tl.float32)
    total_e = tl.zeros((BLOCK_M,), tl.float32)
    at, end = part * share, tl.minimum(total, (part + 1) * share)
    r = tl.load(firsts + part)  # the range that the share begins in
    while at < end:
        stop = tl.minimum(end, tl.load(table + r * 3 + 1).to(tl.int32))
        shift = tl.load(table + r * 3 + 2)
        for start in range(at, stop, BLOCK_N):
            candidate = start + n
            inside = candidate < stop
            tile = tl.load(
                keys + (candidate + shift)[:, None] * k_n + channel[None, :],
                mask=inside[:, None] & (channel < D)[None, :], other=0.0,
            ).to(q.dtype.element_ty)  # fmt: skip
            if DOT:
                s = tl.dot(query, tl.trans(tile), input_precision="ieee")
            else:  # so few rows that they would leave most of a matrix product empty
                s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for i in tl.static_range(BLOCK_M):
                    row = first + i
                    there = (row < GROUP * T) & (channel < D)
                    one = tl.load(q + row // T * q_h + row % T * q_t + channel, there, other=0.0)
                    of_row = tl.sum(tile.to(tl.float32) * one.to(tl.float32)[None, :], 1)
                    s = tl.where((m == row)[:, None], of_row[None, :], s)
            if BIAS:
                s += tl.load(bias + candidate, mask=inside, other=0.0)[None, :]
            s = tl.where(s == 0, 0.0, s)  # -0 equals 0
            if LSE:
                higher = tl.maximum(top, tl.max(tl.where(inside[None, :], s, _NEG), 1))
                e = tl.where(inside[None, :], tl.exp(s - higher[:, None]), 0.0)
                total_e = total_e * tl.exp(top - higher) + tl.sum(e, 1)
                top = higher
            fresh = _ordered(s.to(tl.int32, bitcast=True)).to(tl.int64) << 32
            fresh |= candidate.to(tl.int64)[None, :]
            fresh = tl.where(inside[None, :] & here[:, None], fresh, _NONE)
            worst, greatest = tl.min(best, 1), tl.max(fresh, 1)
            while tl.max((greatest > worst).to(tl.int32), 0) > 0:
                replaced = (best == worst[:, None]) & (greatest > worst)[:, None]
                best = tl.where(replaced, greatest[:, None], best)
                fresh = tl.where(fresh == greatest[:, None], _NONE, fresh)
                worst, greatest = tl.min(best, 1), tl.max(fresh, 1)
        at = stop
        r += 1
    out = part.to(tl.int64) * rows + head * GROUP * T + m
    tl.store(best_out + out[:, None] * TOP + slot[None, :], best, mask=here[:, None])
    if LSE:
        tl.store(lse_out + out, top + tl.log(total_e), mask=here)


@triton.jit
def _merge_kernel(
    best_in, lse_in, wanted, scores, found, lse, rows, rows_a_head, parts, K,
    LSE: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows of all query heads): a row's shares [parts, TOP] -> its best K, best first."""
    row = tl.program_id(0).to(tl.int64)
    searched = tl.load(wanted + row // rows_a_head) != 0
    at, part = tl.arange(0, PARTS * TOP), tl.arange(0, PARTS)
    best = tl.load(
        best_in + (at // TOP * rows + row) * TOP + at % TOP,
        mask=(at < parts * TOP) & searched,
        other=_NONE,
    )
    for i in range(K):
        greatest = tl.max(best, 0)
        best = tl.where(best == greatest, _NONE, best)
        none = greatest < _FIRST
        score = _ordered((greatest >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(scores + row * K + i, tl.where(none, _NEG, score))
        tl.store(found + row * K + i, tl.where(none, -1, greatest & 0xFFFFFFFF))
    if LSE:
        each = tl.load(lse_in + part * rows + row, mask=(part < parts) & searched, other=_NEG)
        top = tl.max(each, 0)
        tl.store(lse + row, top + tl.log(tl.sum(tl.exp(each - top), 0)) if searched else _NEG)


def landmark_topk(
    q: Tensor,
    landmarks: Tensor,
    ranges: Sequence[tuple[int, int]],
    top_k: int,
    *,
    return_lse: bool = False,
    kv_heads: Sequence[int] | None = None,
    bias: Tensor | None = None,
) -> Hits:
    """See `memstore.kernels.api.landmark_topk`; all of top_k have to fit in registers."""
    heads, rows, dim = q.shape
    num_kv_heads = landmarks.shape[0]
    wanted = tuple(range(num_kv_heads)) if kv_heads is None else tuple(kv_heads)
    spans = tuple((start, end) for start, end in ranges if end > start)
    if not (wanted and spans and rows):
        return reference.landmark_topk(q, landmarks, [], top_k, return_lse=return_lse)
    q = q if q.stride(-1) == 1 else q.contiguous()
    landmarks = landmarks if landmarks.stride(-1) == 1 else landmarks.contiguous()
    group, total = heads // num_kv_heads, sum(end - start for start, end in spans)
    sizes = tile_sizes(group * rows, top_k, dim, q.dtype)
    tiles = triton.cdiv(group * rows, sizes["BLOCK_M"])
    share = share_of(total, tiles * len(wanted), multiprocessors(q.device), sizes)
    parts = triton.cdiv(total, share)
    table, firsts = _tables(spans, share, q.device)
    searched, head_flags = _heads(wanted, heads, num_kv_heads, q.device)
    best = torch.empty(parts, heads * rows, sizes["TOP"], dtype=torch.int64, device=q.device)
    scores = torch.empty(heads, rows, top_k, dtype=torch.float32, device=q.device)
    found = torch.empty(heads, rows, top_k, dtype=torch.int64, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device) if return_lse else None
    each = (
        torch.empty(parts, heads * rows, dtype=torch.float32, device=q.device)
        if return_lse
        else scores
    )
    _partial_kernel[(tiles, parts, len(wanted))](
        q, landmarks, scores if bias is None else bias.contiguous(), table, firsts, searched, best,
        each, rows, dim, share, total, heads * rows, *q.stride()[:2], *landmarks.stride()[:2],
        LSE=return_lse, BIAS=bias is not None, GROUP=group, **sizes,
    )  # fmt: skip
    _merge_kernel[(heads * rows,)](
        best, each, head_flags, scores, found, scores if lse is None else lse, heads * rows, rows,
        parts, top_k, LSE=return_lse, TOP=sizes["TOP"], PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return Hits(scores, found, lse)


def tile_sizes(rows: int, top_k: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tiles of a search with `rows` query rows a KV head; smaller in float32, which runs without
    tensor cores.
    """
    dot, most, wide = rows > 4, 32 if dtype == torch.float32 else 64, triton.next_power_of_2(rows)
    return {
        "DOT": dot,
        "TOP": triton.next_power_of_2(top_k),
        "BLOCK_M": min(most, max(16, wide)) if dot else wide,
        "BLOCK_N": most if dot else 64,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "num_warps": 4,
    }


def share_of(total: int, programs: int, processors: int, sizes: dict[str, Any]) -> int:
    """How many of `total` candidates one program searches, where `programs` search the same ones
    for other rows.
    """
    parts = min(
        triton.cdiv(total, _SHARE), max(1, 4 * processors // programs), _MOST // sizes["TOP"]
    )
    return triton.cdiv(triton.cdiv(total, parts), sizes["BLOCK_N"]) * sizes["BLOCK_N"]


@lru_cache(maxsize=64)  # every step of a session asks for the same
def _tables(
    spans: tuple[tuple[int, int], ...], share: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """int64 [R, 3]: a range's first candidate, its end, and row minus number; int32: the range each
    share begins in.
    """
    ends = list(accumulate(end - start for start, end in spans))
    firsts = [0, *ends[:-1]]
    table = [(first, end, start - first) for first, end, (start, _) in zip(firsts, ends, spans)]
    begin = [bisect_right(firsts, at) - 1 for at in range(0, ends[-1], share)]
    return torch.tensor(table, device=device), torch.tensor(begin, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _heads(
    wanted: tuple[int, ...], heads: int, num_kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """int32: the KV heads that are searched, and for every query head whether its own is."""
    flags = [int(head // (heads // num_kv_heads) in wanted) for head in range(heads)]
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (wanted, flags))  # type: ignore[return-value]
