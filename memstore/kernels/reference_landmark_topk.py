"""Search over landmark keys in torch: products, then a top k that takes the newer of equals."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.products import accumulate
from memstore.kernels.types import NEG, TopK

_PART = 64  # scores whose maximum stands for them
_LONG = 1 << 16  # scores in all from where on it pays to look at maxima first
_NEAR = 1024  # rows between two spans that are cheaper to score than another product
# numbers that are looked at without tensors: in a decoding step every call costs more than they do
_FEW = 64
_FROM_RIGHT = 1 << 21  # numbers of keys beyond which they no longer lie in a cache


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
    keys.
    ranges: (start, end) rows, oldest first, disjoint. Ties go to the newer row (later in `ranges`).
    kv_heads: the KV heads whose rows are wanted (None = all): the keys of the others are not read,
    and their rows find nothing.
    bias: [n] float32, added to the scores of the n rows of `ranges`, in their order; None = none.
    Returns TopK with exactly top_k columns, best first, scores in float32.
    """
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
