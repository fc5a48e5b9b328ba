"""Grouped-softmax attention in plain torch, in the adjusted-logit form of docs/method.md: any
dtype, differentiable by autograd.

Softmaxes and logsumexps run in float32 at least, whatever the input dtype; float64 stays float64.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.quantised import UnitScales, decode_units
from memstore.kernels.types import NEG, LocalAttention, Negatives, TopK

_PART = 64  # scores whose maximum stands for them
_LONG = 1 << 16  # scores in all from where on it pays to look at maxima first
_NEAR = 1024  # rows between two spans that are cheaper to score than another product
# numbers that are looked at without tensors: in a decoding step every call costs more than they do
_FEW = 64
_FROM_RIGHT = 1 << 21  # numbers of keys beyond which they no longer lie in a cache


def accumulate(x: Tensor) -> Tensor:
    """x in the dtype that sums are taken in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def per_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B * Hkv, (H / Hkv) * T, D]: the query heads of a KV head become more rows of
    it.
    """
    batch, heads, rows, dim = q.shape
    return q.reshape(batch * num_kv_heads, heads // num_kv_heads * rows, dim)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Inner products [B, H, T, S] of q [B, H, T, D] with k [B, Hkv, S, D] of each query head's KV
    head.
    """
    return torch.bmm(per_kv_head(q, k.shape[1]), k.flatten(0, 1).transpose(1, 2)).view(
        *q.shape[:3], k.shape[2]
    )


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, H, T, S] times v [B, Hkv, S, D] -> [B, H, T, D]."""
    return torch.bmm(per_kv_head(weights, v.shape[1]).to(v.dtype), v.flatten(0, 1)).view(
        *weights.shape[:3], v.shape[3]
    )


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


def adjusted_logits(
    q: Tensor,
    k: Tensor,
    block_size: int,
    k_cmt: Tensor | None,
    controlled: Tensor | None,
    last_length: int | None = None,
    negatives: Negatives | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Adjusted logits over content [B, H, T, nb, l]; with a CMT its score c and its own logit (both
    [B, H, T]); and those of negatives [B, H, T, N], if there are any.

    The CMT's own logit is NEG where controlled blocks take its mass. docs/method.md sections 2 and
    3.
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
    against = None if negatives is None else _negative_scores(q, negatives)
    c = null = None
    if k_cmt is not None:
        of_kv_head = q.unflatten(1, (len(k_cmt), -1))  # (B, Hkv, H / Hkv, T, D)
        c = null = accumulate((of_kv_head * k_cmt[:, None, None].to(q.dtype)).sum(-1).flatten(1, 2))
        governed = []  # log-masses of what is controlled, NEG elsewhere
        if controlled is not None:
            mine = (
                F.pad(controlled, (0, num_blocks - controlled.shape[1]))[:, None, None, :] & earlier
            )
            governed.append(mass[..., 0].masked_fill(~mine, NEG))
        if against is not None and negatives is not None and negatives.controlled is not None:
            under = negatives.controlled[:, None, None, :]
            governed.append(against.masked_fill(~under, NEG))
        if governed:
            y = torch.cat(governed, -1).logsumexp(-1)
            shift, some = (c - y)[..., None], y > NEG / 2
            null = c.masked_fill(some, NEG)
            if controlled is not None:
                mass = torch.where(mine[..., None], mass + shift[..., None], mass)
            if against is not None and len(governed) > (controlled is not None):
                against = torch.where(under & some[..., None], against + shift, against)
    logits = torch.where(earlier[..., None], content.log_softmax(-1) + mass, content).masked_fill(
        hidden, NEG
    )
    return logits, c, null, against


def _negative_scores(q: Tensor, negatives: Negatives) -> Tensor:
    """Scores [B, H, T, N] with their bias, NEG at the lowest."""
    queries = q if negatives.queries is None else negatives.queries
    s = accumulate(scores(queries, negatives.keys.expand(len(q), -1, -1, -1)))
    if negatives.bias is None:
        return s
    return (s + negatives.bias[:, None, None, :]).clamp(min=NEG)


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
) -> Tensor:
    """See `memstore.kernels.api.grouped_softmax_attention`."""
    if cu_seqlens is not None:
        return _packed_attention(q, k, v, block_size, k_cmt, controlled, cu_seqlens, negatives)
    logits, _, null, against = adjusted_logits(
        q, k, block_size, k_cmt, controlled, negatives=negatives
    )
    flat = logits.flatten(-2)
    content = flat.shape[-1]
    others = [x for x in (against, None if null is None else null[..., None]) if x is not None]
    weights = (torch.cat([flat, *others], -1) if others else flat).softmax(-1)
    output = weighted(weights[..., :content], _content(v, block_size))
    if negatives is not None:
        values = negatives.values.expand(len(q), -1, -1, -1)
        output = output + weighted(weights[..., content : content + values.shape[2]], values)
    return output


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    k_cmt: Tensor | None,
    controlled: Tensor | None,
    cu_seqlens: Tensor,
    negatives: Negatives | None,
) -> Tensor:
    """One document after the other; rows of none are zeros."""
    bounds = cu_seqlens.tolist()
    outputs, block = [], 0
    for document, (start, end) in enumerate(pairwise(bounds)):
        mine, blocks = slice(start, end), (end - start) // (block_size + 1)
        of_document = None
        if negatives is not None:
            of_document = replace(
                negatives,
                bias=None if negatives.bias is None else negatives.bias[document, None],
                controlled=None
                if negatives.controlled is None
                else negatives.controlled[document, None],
                queries=None if negatives.queries is None else negatives.queries[:, :, mine],
            )
        outputs.append(
            grouped_softmax_attention(
                q[:, :, mine],
                k[:, :, mine],
                v[:, :, mine],
                block_size,
                k_cmt=k_cmt,
                controlled=None if controlled is None else controlled[:, block : block + blocks],
                negatives=of_document,
            )
        )
        block += blocks
    outputs.append(torch.zeros_like(q[:, :, bounds[-1] :]))
    return torch.cat(outputs, 2)


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
    """See `memstore.kernels.api.local_attention`."""
    logits, c, null, _ = adjusted_logits(q, k, block_size, k_cmt, controlled, last_length)
    # Landmarks get logits too, of no weight: then the values are used as they lie.
    everything = F.pad(logits, (0, 1), value=NEG).flatten(-2)[..., : k.shape[2]]
    if null is not None:
        everything = torch.cat([everything, null[..., None]], -1)
    weights = everything.softmax(-1)
    lse = everything.amax(-1) - weights.amax(-1).log()
    # not its weight, where controlled blocks took that
    gate = torch.zeros_like(lse) if c is None else (c - lse).exp()
    return LocalAttention(weighted(weights[..., : k.shape[2]], v), gate, lse)


def _content(v: Tensor, block_size: int) -> Tensor:
    """Values [B, H, S, D] of a run of blocks without its landmarks, the last block padded with
    zeros: [B, H, nb * l, D].
    """
    b = block_size + 1
    missing = -v.shape[2] % b
    if missing:
        v = F.pad(v, (0, 0, 0, missing))
    return v.unflatten(2, (-1, b))[:, :, :, :block_size].flatten(2, 3)


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
    """See `memstore.kernels.api.landmark_topk`."""
    heads, num_rows, dim = q.shape
    num_kv_heads = landmarks.shape[0]
    wanted = [(0, num_kv_heads)] if kv_heads is None else _runs(kv_heads)
    spans = [(start, end) for start, end in ranges if end > start]
    if not (wanted and spans and num_rows):
        shape = (heads, num_rows)
        lse = q.new_full(shape, NEG, dtype=torch.float32) if return_lse else None
        nothing = torch.full((*shape, top_k), -1, device=q.device)
        return TopK(q.new_full(nothing.shape, NEG, dtype=torch.float32), nothing, lse)
    grouped = q.reshape(num_kv_heads, -1, dim)
    all_scores = _joined([_in_spans(grouped[a:b], landmarks[a:b], spans) for a, b in wanted], 0)
    all_scores = accumulate(all_scores)
    if bias is not None:
        all_scores = all_scores + bias
    k = min(top_k, all_scores.shape[-1])
    best, rows = _topk_newest(all_scores, k)
    if len(spans) > 1:
        starts = torch.tensor([start for start, _ in spans], device=q.device)
        firsts = torch.tensor([0, *(end - start for start, end in spans)], device=q.device).cumsum(
            0
        )
        span = torch.searchsorted(firsts, rows.contiguous(), right=True) - 1
        rows = rows - firsts[span] + starts[span]
    elif spans[0][0]:
        rows = rows + spans[0][0]
    if k < top_k:
        best, rows = F.pad(best, (0, top_k - k), value=NEG), F.pad(rows, (0, top_k - k), value=-1)
    lse = all_scores.logsumexp(-1) if return_lse else None
    if len(best) < num_kv_heads:
        best, rows = (
            _of_all(best, num_kv_heads, wanted, NEG),
            _of_all(rows, num_kv_heads, wanted, -1),
        )
        lse = None if lse is None else _of_all(lse, num_kv_heads, wanted, NEG)
    lse = None if lse is None else lse.view(heads, num_rows)
    return TopK(best.reshape(heads, num_rows, top_k), rows.reshape(heads, num_rows, top_k), lse)


def _in_spans(q: Tensor, landmarks: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Inner products [n, T, rows of all spans] of q [n, T, D] with landmarks [n, N, D].

    Spans with few rows between them are multiplied as one, and what lies between is cut out of the
    scores.
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
    """q [n, T, D] times keys [n, N, D] transposed; few rows against much memory are faster from the
    right.
    """
    keys = keys.to(q.dtype)
    if q.device.type == "cpu":
        # bmm copies half-precision keys that have room behind them, mm does not
        if q.dtype.itemsize == 2:
            return torch.stack(
                [of_head @ its_keys.T for of_head, its_keys in zip(q, keys, strict=True)]
            )
        if q.shape[1] <= 8 and q.shape[2] >= 64 and keys.numel() > _FROM_RIGHT:
            return torch.bmm(keys, q.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(q, keys.transpose(1, 2))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers as runs (first, end) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _of_all(x: Tensor, num_kv_heads: int, wanted: list[tuple[int, int]], nothing: float) -> Tensor:
    """Results [n, ...] of the wanted runs of KV heads among those of all, the others filled with
    `nothing`.
    """
    if len(wanted) == 1:
        first, end = wanted[0]
        return F.pad(x, (0, 0) * (x.dim() - 1) + (first, num_kv_heads - end), value=nothing)
    full = x.new_full((num_kv_heads, *x.shape[1:]), nothing)
    at = 0
    for first, end in wanted:
        full[first:end] = x[at : at + end - first]
        at += end - first
    return full


def _topk_newest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, best first; of equals the later wins (torch.topk promises no
    order among them).
    """
    parts = x.shape[-1] // _PART
    if x.numel() >= _LONG and parts > k:
        return _topk_by_parts(x, k)
    best, position = x.topk(min(k + 1, x.shape[-1]), -1)
    if (
        best.numel() <= _FEW
        and best.device.type == "cpu"
        and all(map(_distinct, best.flatten(0, -2).tolist()))
    ):
        return best[..., :k], position[..., :k]
    # one more than wanted shows whether others equal the last
    doubtful = best[..., 1:] == best[..., :-1]
    best, position = best[..., :k], position[..., :k]
    if doubtful.any():
        of_row = doubtful.any(-1)
        some = x[of_row]
        position = position.clone()
        if parts > k:
            position[of_row] = _topk_by_parts(some, k)[1]
        else:
            order = some.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
            position[of_row] = x.shape[-1] - 1 - order
        best = x.gather(-1, position)
    return best, position


def _distinct(values: list[float]) -> bool:
    return len(set(values)) == len(values)


def _topk_by_parts(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """_topk_newest of more than k parts: the k with the greatest maxima, of equals the later, hold
    what is wanted.

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
    """See `memstore.kernels.api.memory_attention`."""
    if (
        gated
        and scales is None
        and slots.numel() <= _FEW
        and q.device.type == "cpu"
        and q.shape[:2] == (1, 1)
    ):
        of_slots = slots.flatten().tolist()
        if q.shape[3] == 1 and min(of_slots, default=-1) >= 0:
            return _attend_token(
                q, keys, values, lengths, slots, landmark_scores, local, return_mass
            )
    missing = slots < 0
    if scales is not None:
        used = slots.clamp(min=0).flatten()
        lengths = lengths.index_select(0, used)
        keys, values = decode_units(
            keys.index_select(0, used), values.index_select(0, used), lengths, scales.take(used)
        )
        slots = torch.arange(len(used), device=used.device).view(slots.shape)
    logits = accumulate(landmark_scores).masked_fill(missing, NEG)
    if gated:
        gate, keep = accumulate(local.gate), None
    else:
        gate = (logits.logsumexp(-1) - accumulate(local.lse)).sigmoid()
        keep = 1 - gate
    share = (logits.softmax(-1) * gate[..., None]).masked_fill(missing, 0.0)  # (B, H, T, K)
    attend = (
        _attend_rows
        if slots.shape[2] > 1
        else _attend_one
        if q.shape[:2] == (1, 1)
        else _attend_shared
    )
    # Without weight, another unit stands for a missing one: what lies in a slot that was not named
    # may be no number.
    read = slots.masked_fill(missing, slots.amax()).clamp(min=0)
    memory = attend(q, keys, values, lengths, read, rotations, share)
    output = local.output if keep is None else local.output * keep[..., None].to(local.output.dtype)
    return output + memory.to(output.dtype), share if return_mass else None


def _attend_token(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    landmark_scores: Tensor,
    local: LocalAttention,
    return_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gated attention of a decoding step whose heads all have their units: the same sums in half
    the calls.
    """
    share = accumulate(landmark_scores).softmax(-1) * accumulate(local.gate)[..., None]
    memory = _attend_one(q, keys, values, lengths, slots, slots, share)
    return local.output + memory.to(local.output.dtype), share if return_mass else None


def _attend_one(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    rotations: Tensor,
    share: Tensor,
) -> Tensor:
    """As `_attend_shared` for one sequence and one rotation, which is a decoding step: as few calls
    as will do.
    """
    heads, _, k = slots.shape[1:]
    index, size, dim = slots.flatten(), keys.shape[1], keys.shape[2]
    unit_k = keys.index_select(0, index).to(q.dtype).view(heads, k * size, dim)
    unit_v = values.index_select(0, index).to(q.dtype).view(heads, k * size, dim)
    # (H, T, K, l)
    s = accumulate(torch.bmm(q.flatten(0, 2), unit_k.transpose(1, 2))).view(heads, -1, k, size)
    s = _mask_lengths(s, lengths.index_select(0, index).view(heads, 1, k), size)
    weights = s.softmax(-1) * share[0, ..., None]  # (H, T, K, l)
    return torch.bmm(weights.flatten(2).to(q.dtype), unit_v)[None]


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
    batch, heads = slots.shape[:2]
    index = slots[:, :, 0]  # (B, H, K)
    unit_k, unit_v = _units(keys, index, q.dtype), _units(values, index, q.dtype)  # (B, H, K, l, D)
    b_index = torch.arange(batch, device=q.device)[:, None, None]
    h_index = torch.arange(heads, device=q.device)[None, :, None]
    rotated = q[rotations[:, :, 0], b_index, h_index]  # (B, H, K, T, D)
    s = accumulate(rotated @ unit_k.transpose(-1, -2))  # (B, H, K, T, l)
    s = _mask_lengths(s, lengths[index][:, :, :, None], keys.shape[1])
    weights = s.softmax(-1) * share.transpose(-1, -2)[..., None]  # (B, H, K, T, l)
    flat = weights.permute(0, 1, 3, 2, 4).flatten(3)  # (B, H, T, K * l)
    return flat.to(q.dtype) @ unit_v.flatten(2, 3)


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
