"""Search over landmark keys in torch: products, then a top k that takes the newer of equals."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.products import accumulate
from memstore.kernels.types import NEG, Hits

_PART = 64  # scores whose maximum stands for them
_LONG = 1 << 16  # scores in all from where on it pays to look at maxima first
_NEAR = 1024  # rows between two spans that are cheaper to score than another product
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
) -> Hits:
    """The top_k landmark keys by inner product for every query row, within ranges of rows.

    q: [H, T, D] rotated and scaled. landmarks: [Hkv, N, D], each query head scores its KV head's
    keys.
    ranges: (start, end) rows, disjoint, whose concatenation are the candidates, oldest first. Of
    equal scores the newer comes first.
    kv_heads: the KV heads whose rows are wanted (None = all): the keys of the others are not read,
    and their rows find nothing.
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
    """q [n, T, D] times keys [n, N, D] transposed; on a CPU few rows against much memory are faster
    from the right.
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
