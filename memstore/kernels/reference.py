"""The calls of api.py in plain torch, in any dtype, and their types. Autograd differentiates the
grouped softmax; of equal scores, search prefers the newer.

Softmaxes and logsumexps run in float32 at least, whatever the input dtype; float64 stays float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

NEG = -1e30
"""Stands for minus infinity: large enough to vanish in float32, finite so that a fully masked group
gives no NaN.
"""
_PART = 64  # scores whose maximum stands for them
_LONG = 1 << 16  # scores in all from where on it pays to look at maxima first
_NEAR = 1024  # rows between two spans that are cheaper to score than another product
_FROM_RIGHT = 1 << 21  # numbers of keys beyond which they no longer lie in a cache


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


def accumulate(x: Tensor) -> Tensor:
    """x in the dtype for sums: float32, or float64 if x is float64."""
    return x if x.dtype == torch.float64 else x.float()


def per_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B * Hkv, (H / Hkv) * T, D]: query heads of a KV head as its rows."""
    batch, heads, rows, dim = q.shape
    return q.reshape(batch * num_kv_heads, heads // num_kv_heads * rows, dim)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Inner products [B, H, T, S] of q [B, H, T, D] and k [B, Hkv, S, D], each query head with its
    KV head.
    """
    return torch.bmm(per_kv_head(q, k.shape[1]), k.flatten(0, 1).transpose(1, 2)).view(
        *q.shape[:3], k.shape[2]
    )


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, H, T, S] times v [B, Hkv, S, D] -> [B, H, T, D]."""
    return torch.bmm(per_kv_head(weights, v.shape[1]).to(v.dtype), v.flatten(0, 1)).view(
        *weights.shape[:3], v.shape[3]
    )


# Grouped softmax (docs/appendix/method.md, in the form of adjusted logits)


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
    """Grouped softmax of the last T positions of a run of blocks over that run
    (docs/appendix/method.md sections 2 and 3).

    q: [B, H, T, D] rotated and scaled; the rows are the last T of the S positions. k, v: [B, Hkv,
    S, D]; position s is the landmark of its block where s % (block_size + 1) == block_size; a
    partial last block has none. H is a multiple of Hkv.
    k_cmt: [Hkv, D], the context miss token's key rotated to position -1; None for a model without
    one.
    controlled: [B, S // (block_size + 1)] bool, blocks that share the gate's mass (training); None
    = all free (inference).
    last_length: content tokens of the last block that are real, the rest being padding (a
    document's closed last block).
    """
    logits, c, null = adjusted_logits(q, k, block_size, k_cmt, controlled, last_length)
    # Landmarks get logits too, of no weight: then the values are used as they lie.
    everything = F.pad(logits, (0, 1), value=NEG).flatten(-2)[..., : k.shape[2]]
    if null is not None:
        everything = torch.cat([everything, null[..., None]], -1)
    weights = everything.softmax(-1)
    lse = everything.amax(-1) - weights.amax(-1).log()
    # not its weight, where controlled blocks took that
    gate = torch.zeros_like(lse) if c is None else (c - lse).exp()
    return LocalAttention(weighted(weights[..., : k.shape[2]], v), gate, lse)


def adjusted_logits(
    q: Tensor,
    k: Tensor,
    block_size: int,
    k_cmt: Tensor | None,
    controlled: Tensor | None,
    last_length: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Adjusted logits over content [B, H, T, nb, l]; with a CMT its score c and its own logit (both
    [B, H, T]).

    The CMT's own logit is NEG where controlled blocks take its mass. docs/appendix/method.md
    sections 2 and 3.
    """
    rows, positions, b = q.shape[2], k.shape[2], block_size + 1
    num_blocks = -(-positions // b)
    earlier, hidden = _visibility(rows, positions, block_size, q.device)
    if last_length is not None:
        hidden = hidden.clone()
        hidden[:, -1, last_length:] = True
    raw = accumulate(scores(q, k))
    if num_blocks * b != positions:
        raw = F.pad(raw, (0, num_blocks * b - positions))
    raw = raw.view(*raw.shape[:3], num_blocks, b)
    content, mass = raw[..., :block_size], raw[..., block_size:]
    c = null = None
    if k_cmt is not None:
        of_kv_head = q.unflatten(1, (len(k_cmt), -1))  # (B, Hkv, H / Hkv, T, D)
        c = null = accumulate((of_kv_head * k_cmt[:, None, None].to(q.dtype)).sum(-1).flatten(1, 2))
        if controlled is not None:
            room = num_blocks - controlled.shape[1]
            mine = F.pad(controlled, (0, room))[:, None, None, :] & earlier
            y = mass[..., 0].masked_fill(~mine, NEG).logsumexp(-1)  # of what is controlled
            null = c.masked_fill(y > NEG / 2, NEG)
            mass = torch.where(mine[..., None], mass + (c - y)[..., None, None], mass)
    logits = torch.where(earlier[..., None], content.log_softmax(-1) + mass, content).masked_fill(
        hidden, NEG
    )
    return logits, c, null


@lru_cache(maxsize=64)
def _grid(
    first_block: int, num_blocks: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`_visibility` of every position from first_block on. Cached, because every step asks for it:
    do not write to it.
    """
    b = block_size + 1
    query = torch.arange(first_block * b, num_blocks * b, device=device)
    block = torch.arange(num_blocks, device=device)
    offset = torch.arange(block_size, device=device)
    earlier = block < (query // b)[:, None]
    own = block == (query // b)[:, None]
    visible = earlier[:, :, None] | (own[:, :, None] & (offset <= (query % b)[:, None])[:, None, :])
    return earlier, ~visible


def _visibility(
    rows: int, positions: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For the last `rows` of `positions`: earlier[T, nb] complete blocks before the row's own;
    hidden[T, nb, l] content.
    """
    first_block, start = divmod(positions - rows, block_size + 1)
    earlier, hidden = _grid(first_block, -(-positions // (block_size + 1)), block_size, device)
    return earlier[start : start + rows], hidden[start : start + rows]


# Search over landmark keys


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
    """The top_k landmark keys of every query row by inner product, within ranges of keys.

    q: [H, T, D] rotated and scaled. landmarks: [Hkv, N, D], each query head scores its KV head's
    keys.
    ranges: disjoint (start, end) of keys; their concatenation is the candidates, oldest first. Of
    equal scores the newer comes first.
    kv_heads: KV heads to search (None = all); rows of the other heads find nothing.
    bias: [candidates] float32, added to their scores; None = none.
    Returns Hits with exactly top_k columns, best first, scores in float32.
    """
    heads, num_rows, dim = q.shape
    num_kv_heads = landmarks.shape[0]
    wanted = list(range(num_kv_heads) if kv_heads is None else kv_heads)
    spans = [(start, end) for start, end in ranges if end > start]
    if not (wanted and spans and num_rows):
        shape = (heads, num_rows)
        lse = q.new_full(shape, NEG, dtype=torch.float32) if return_lse else None
        nothing = torch.full((*shape, top_k), -1, device=q.device)
        return Hits(q.new_full(nothing.shape, NEG, dtype=torch.float32), nothing, lse)
    grouped = q.reshape(num_kv_heads, -1, dim)
    every = len(wanted) == num_kv_heads
    slices = [slice(None)] if every else [slice(head, head + 1) for head in wanted]
    scores = accumulate(
        _joined([_in_spans(grouped[some], landmarks[some], spans) for some in slices], 0)
    )
    if bias is not None:
        scores = scores + bias
    k = min(top_k, scores.shape[-1])
    best, candidates = _topk_newest(scores, k)
    if k < top_k:
        best = F.pad(best, (0, top_k - k), value=NEG)
        candidates = F.pad(candidates, (0, top_k - k), value=-1)

    def of_all(x: Tensor, nothing: float, *shape: int) -> Tensor:
        """Results [n, ..] of the wanted KV heads as [H, T, ..], the others filled."""
        if not every:
            full = x.new_full((num_kv_heads, *x.shape[1:]), nothing)
            full[wanted] = x
            x = full
        return x.reshape(heads, num_rows, *shape)

    lse = of_all(scores.logsumexp(-1), NEG) if return_lse else None
    return Hits(of_all(best, NEG, top_k), of_all(candidates, -1, top_k), lse)


def _in_spans(q: Tensor, landmarks: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Inner products [n, T, rows of all spans] of q [n, T, D] with landmarks [n, N, D].

    Spans with few rows between them are multiplied as one; the scores between are dropped.
    """
    hulls: list[list[tuple[int, int]]] = []
    for span in spans:
        if hulls and 0 <= span[0] - hulls[-1][-1][1] <= _NEAR:
            hulls[-1].append(span)
        else:
            hulls.append([span])
    pieces = []
    for hull in hulls:
        first = hull[0][0]
        product = _product(q, landmarks[:, first : hull[-1][1]])
        pieces += (
            [product] if len(hull) == 1 else [product[..., a - first : b - first] for a, b in hull]
        )
    return _joined(pieces, -1)


def _product(q: Tensor, keys: Tensor) -> Tensor:
    """q [n, T, D] times transposed keys [n, N, D]; on a CPU few rows are faster as the right
    factor.
    """
    keys = keys.to(q.dtype)
    few = q.device.type == "cpu" and q.shape[1] <= 8 and q.shape[2] >= 64
    if few and keys.numel() > _FROM_RIGHT:
        return torch.bmm(keys, q.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(q, keys.transpose(1, 2))


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _topk_newest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, best first; of equals the later wins (torch.topk promises no
    order among them).
    """
    parts = x.shape[-1] // _PART
    if x.numel() >= _LONG and parts > k:
        return _topk_by_parts(x, k)
    best, position = x.topk(min(k + 1, x.shape[-1]), -1)
    # one more than wanted shows whether others equal the last
    doubtful = best[..., 1:] == best[..., :-1]
    best, position = best[..., :k], position[..., :k]
    if doubtful.any():
        of_row = doubtful.any(-1)
        some = x[of_row]
        position = position.clone()
        order = some.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        position[of_row] = x.shape[-1] - 1 - order
        best = x.gather(-1, position)
    return best, position


def _topk_by_parts(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """_topk_newest by more than k parts: the result lies in the k parts with the greatest maxima
    (of equals the later).

    A part left out has k elements elsewhere that come before its own.
    """
    parts, tail = divmod(x.shape[-1], _PART)
    whole = x[..., : parts * _PART].unflatten(-1, (parts, _PART))
    # (.., k), so that later stays later
    chosen = _topk_newest(whole.amax(-1), k)[1].sort(-1).values
    inside = whole.gather(-2, chosen[..., None].expand(*chosen.shape, _PART)).flatten(-2)
    if tail:
        inside = torch.cat([inside, x[..., -tail:]], -1)
    best, position = _topk_newest(inside, k)
    part = F.pad(chosen, (0, 1), value=parts).gather(-1, position // _PART)
    return best, part * _PART + position % _PART


# Attention to retrieved units, whose slots are gathered


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
    """Add the retrieved blocks to a chunk's local attention (docs/appendix/method.md sections 2 to
    4).

    q: [R, B, H, T, D], the scaled queries under R rotations: one a slot position, or one for all
    old blocks.
    keys, values: [S, block_size, D] slabs of unit slots, in any float dtype, each slot contiguous;
    lengths: [S] int64, valid content tokens of a slot.
    slots: [B, H, T or 1, K] int64 slot of each selected unit, -1 for none; a 1 shares the selection
    among all rows.
    rotations: like slots, the index into q's first axis under which that unit is scored.
    landmark_scores: [B, H, T, K] float, log-mass of each unit before the softmax over units;
    ignored where slots is -1.
    local: what `local_attention` gave for the same rows; with `gated` its gate is the memory's mass
    (0 closes a row; rows with no unit keep their missing mass); without, memory and chunk share one
    softmax through `local.lse`.
    Returns output [B, H, T, D] and, if asked, the attention mass of each unit [B, H, T, K] (else
    None).
    """
    missing = slots < 0
    logits = accumulate(landmark_scores).masked_fill(missing, NEG)
    if gated:
        gate, keep = accumulate(local.gate), None
    else:
        gate = (logits.logsumexp(-1) - accumulate(local.lse)).sigmoid()
        keep = 1 - gate
    share = (logits.softmax(-1) * gate[..., None]).masked_fill(missing, 0.0)  # (B, H, T, K)
    attend = _attend_rows if slots.shape[2] > 1 else _attend_shared
    # A slot that no row names may hold anything, NaN too, and NaN times a weight of 0 is NaN: in
    # place of a missing unit one that is there is read, and where there is none nothing is.
    some = slots.amax()
    if some < 0:
        return local.output, share if return_mass else None
    read = slots.masked_fill(missing, some)
    memory = attend(q, keys, values, lengths, read, rotations, share)
    output = local.output if keep is None else local.output * keep[..., None].to(local.output.dtype)
    return output + memory.to(output.dtype), share if return_mass else None


def _attend_shared(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    rotations: Tensor,
    share: Tensor,
) -> Tensor:
    """Every row reads the same units of its head: slots [B, H, 1, K]."""
    batch, heads, _, k = slots.shape
    rows, size, dim = q.shape[3], keys.shape[1], keys.shape[2]
    index = slots.flatten()
    unit_k, unit_v = _units(keys, index, q.dtype), _units(values, index, q.dtype)  # (B H K, l, D)
    if len(q) == 1:  # a decoding step: as few calls as will do
        whole = unit_k.view(batch * heads, k * size, dim)
        s = torch.bmm(q.reshape(-1, rows, dim), whole.transpose(1, 2)).view(-1, rows, k, size)
    else:
        of_head = torch.arange(batch * heads, device=q.device).repeat_interleave(k)
        rotated = q.flatten(1, 2)[rotations.flatten(), of_head]  # (B H K, T, D)
        s = torch.bmm(rotated, unit_k.transpose(1, 2)).view(-1, k, rows, size).transpose(1, 2)
    s = _mask_lengths(accumulate(s), lengths[index].view(-1, 1, k), size)  # (B H, T, K, l)
    weights = s.softmax(-1) * share.flatten(0, 1)[..., None]
    unit_v = unit_v.view(batch * heads, k * size, dim)
    return torch.bmm(weights.flatten(2).to(q.dtype), unit_v).view(q.shape[1:])


def _attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    rotations: Tensor,
    share: Tensor,
) -> Tensor:
    """Each row reads units of its own: only the rows with any mass are gathered."""
    k, size, dim = slots.shape[-1], keys.shape[1], q.shape[-1]
    output = q.new_zeros(q.shape[1:])
    # (M), of the rows of every sequence and head
    rows = (share > 0).any(-1).flatten().nonzero().flatten()
    if len(rows) == 0:
        return output
    # (M, K)
    index, turn, mass = (x.flatten(0, 2).index_select(0, rows) for x in (slots, rotations, share))
    unit_k, unit_v = _units(keys, index, q.dtype), _units(values, index, q.dtype)  # (M, K, l, D)
    rotated = q.flatten(1, 3)[turn, rows[:, None]]  # (M, K, D)
    # The queries on the left: products of a matrix with one column are slow.
    # (M, K, l)
    s = torch.bmm(rotated.view(-1, 1, dim), unit_k.view(-1, size, dim).transpose(1, 2)).view(
        -1, k, size
    )
    s = _mask_lengths(accumulate(s), lengths[index], size)
    weights = (s.softmax(-1) * mass[..., None]).to(q.dtype)
    output.view(-1, dim)[rows] = torch.bmm(
        weights.flatten(1)[:, None], unit_v.flatten(1, 2)
    ).squeeze(1)
    return output


def _units(slab: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """slab[index] in another dtype."""
    return slab.index_select(0, index.flatten()).to(dtype).view(*index.shape, *slab.shape[1:])


def _mask_lengths(s: Tensor, lengths: Tensor, block_size: int) -> Tensor:
    """Scores [..., l] with the padding of a document's closed last block masked; lengths has s's
    axes but the last.
    """
    if int(lengths.min()) == block_size:
        return s
    return s.masked_fill(torch.arange(block_size, device=s.device) >= lengths[..., None], NEG)
