"""Grouped-softmax attention in plain torch, in the adjusted-logit form of docs/method.md: any dtype, differentiable by autograd.

Softmaxes and logsumexps run in float32 at least, whatever the input dtype; float64 stays float64.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.results import NEG, LocalAttention, TopK


def accumulate(x: Tensor) -> Tensor:
    """x in the dtype that sums are taken in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def per_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B, Hkv, (H / Hkv) * T, D]: the query heads of a KV head become more rows of it."""
    batch, heads, rows, dim = q.shape
    return q.reshape(batch, num_kv_heads, heads // num_kv_heads * rows, dim)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Inner products [B, H, T, S] of q [B, H, T, D] with k [B, Hkv, S, D] of each query head's KV head."""
    batch, heads, rows, _ = q.shape
    return (per_kv_head(q, k.shape[1]) @ k.transpose(-1, -2)).view(batch, heads, rows, k.shape[2])


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, H, T, S] times v [B, Hkv, S, D] -> [B, H, T, D]."""
    batch, heads, rows, _ = weights.shape
    return (per_kv_head(weights, v.shape[1]).to(v.dtype) @ v).view(batch, heads, rows, v.shape[3])


@lru_cache(maxsize=64)
def _visibility(rows: int, positions: int, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the last `rows` of `positions`: earlier[T, nb] complete blocks before the row's own; visible[T, nb, l] content.

    Cached, because every layer of a step asks for the same: do not write to it.
    """
    b = block_size + 1
    num_blocks = -(-positions // b)
    query = torch.arange(positions - rows, positions, device=device)
    block = torch.arange(num_blocks, device=device)
    offset = torch.arange(block_size, device=device)
    earlier = block < (query // b)[:, None]
    own = block == (query // b)[:, None]
    visible = earlier[:, :, None] | (own[:, :, None] & (offset <= (query % b)[:, None])[:, None, :])
    return earlier, visible


def adjusted_logits(
    q: Tensor,
    k: Tensor,
    block_size: int,
    k_cmt: Tensor | None,
    controlled: Tensor | None,
    last_length: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Adjusted logits over content [B, H, T, nb, l], and with a CMT its score c and its own logit (both [B, H, T]).

    The CMT's own logit is NEG where controlled blocks take its mass. docs/method.md sections 2 and 3.
    """
    rows, positions, b = q.shape[2], k.shape[2], block_size + 1
    num_blocks = -(-positions // b)
    earlier, visible = _visibility(rows, positions, block_size, q.device)
    if last_length is not None:
        visible = visible.clone()
        visible[:, -1, last_length:] = False
    raw = accumulate(scores(q, k))
    if num_blocks * b != positions:
        raw = F.pad(raw, (0, num_blocks * b - positions))
    raw = raw.view(*raw.shape[:3], num_blocks, b)
    content, landmark = raw[..., :block_size], raw[..., block_size]
    bias = landmark - content.logsumexp(-1)
    c = null = None
    if k_cmt is not None:
        group = q.shape[1] // k_cmt.shape[0]
        c = null = accumulate((q * k_cmt.repeat_interleave(group, 0)[None, :, None].to(q.dtype)).sum(-1))
        if controlled is not None:
            mine = F.pad(controlled, (0, num_blocks - controlled.shape[1]))[:, None, None, :] & earlier
            y = landmark.masked_fill(~mine, NEG).logsumexp(-1)
            bias = torch.where(mine, bias + (c - y)[..., None], bias)
            null = c.masked_fill(mine.any(-1), NEG)
    logits = (content + torch.where(earlier, bias, 0.0)[..., None]).masked_fill(~visible, NEG)
    return logits, c, null


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, *, k_cmt: Tensor | None = None, controlled: Tensor | None = None
) -> Tensor:
    """What `local_attention` returns as output, by one softmax, for training on whole windows. Shapes as there."""
    logits, _, null = adjusted_logits(q, k, block_size, k_cmt, controlled)
    flat = logits.flatten(-2)
    if null is None:
        weights = flat.softmax(-1)
    else:
        weights = torch.cat([flat, null[..., None]], -1).softmax(-1)[..., :-1]
    return weighted(weights, _content(v, block_size))


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
    logits, c, null = adjusted_logits(q, k, block_size, k_cmt, controlled, last_length)
    flat = logits.flatten(-2)
    everything = flat if null is None else torch.cat([flat, null[..., None]], -1)
    lse = everything.logsumexp(-1)
    weights = (flat - lse[..., None]).exp()
    gate = torch.zeros_like(lse) if c is None else (c - lse).exp()
    return LocalAttention(weighted(weights, _content(v, block_size)), gate, lse)


def _content(v: Tensor, block_size: int) -> Tensor:
    """Values [B, H, S, D] of a run of blocks without its landmarks, the last block padded with zeros: [B, H, nb * l, D]."""
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
) -> TopK:
    """See `memstore.kernels.api.landmark_topk`."""
    heads, num_rows, dim = q.shape
    num_kv_heads = landmarks.shape[0]
    wanted = None if kv_heads is None or len(kv_heads) == num_kv_heads else list(kv_heads)
    spans = [(start, end) for start, end in ranges if end > start]
    grouped = q.reshape(num_kv_heads, -1, dim)
    total = sum(end - start for start, end in spans)
    if total == 0 or num_rows == 0 or wanted == []:
        lse = q.new_full((heads, num_rows), NEG, dtype=torch.float32) if return_lse else None
        return TopK(
            q.new_full((heads, num_rows, top_k), NEG, dtype=torch.float32),
            torch.full((heads, num_rows, top_k), -1, device=q.device),
            lse,
        )
    if wanted is None:
        parts = [grouped @ landmarks[:, start:end].to(q.dtype).transpose(-1, -2) for start, end in spans]
    else:
        parts = [torch.stack([grouped[h] @ landmarks[h, start:end].to(q.dtype).T for h in wanted]) for start, end in spans]
    all_scores = accumulate(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
    k = min(top_k, total)
    best, position = _topk_newest(all_scores, k)
    if len(spans) == 1:
        rows = position + spans[0][0]
    else:
        starts = torch.tensor([start for start, _ in spans], device=q.device)
        firsts = torch.tensor([0, *(end - start for start, end in spans)], device=q.device).cumsum(0)
        span = torch.searchsorted(firsts, position, right=True) - 1
        rows = position - firsts[span] + starts[span]
    if k < top_k:
        best, rows = F.pad(best, (0, top_k - k), value=NEG), F.pad(rows, (0, top_k - k), value=-1)
    lse = all_scores.logsumexp(-1) if return_lse else None
    if wanted is not None:
        best, rows = _of_all(best, num_kv_heads, wanted, NEG), _of_all(rows, num_kv_heads, wanted, -1)
        lse = None if lse is None else _of_all(lse, num_kv_heads, wanted, NEG)
    lse = None if lse is None else lse.view(heads, num_rows)
    return TopK(best.view(heads, num_rows, top_k), rows.view(heads, num_rows, top_k), lse)


def _of_all(x: Tensor, num_kv_heads: int, wanted: list[int], nothing: float) -> Tensor:
    """Results [len(wanted), ...] of some KV heads among those of all, the others filled with `nothing`."""
    full = x.new_full((num_kv_heads, *x.shape[1:]), nothing)
    full[wanted] = x
    return full


def _topk_newest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, best first; of equals the later one wins (torch.topk promises no order among equals)."""
    best, position = x.topk(min(k + 1, x.shape[-1]), -1)
    doubtful = (best[..., 1:] == best[..., :-1]).any(-1)  # one more than wanted shows whether others equal the last
    best, position = best[..., :k], position[..., :k].contiguous()
    if doubtful.any():
        rows = x[doubtful].flip(-1)
        order = rows.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        position = position.clone()
        position[doubtful] = x.shape[-1] - 1 - order
        best = x.gather(-1, position)
    return best, position


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
    missing = slots < 0
    logits = accumulate(landmark_scores).masked_fill(missing, NEG)
    if gated:
        gate, keep = accumulate(local.gate), None
    else:
        gate = (logits.logsumexp(-1) - accumulate(local.lse)).sigmoid()
        keep = 1 - gate
    share = (logits.softmax(-1) * gate[..., None]).masked_fill(missing, 0.0)  # (B, H, T, K)
    attend = _attend_rows if slots.shape[2] > 1 else _attend_one if q.shape[:2] == (1, 1) else _attend_shared
    memory = attend(q, keys, values, lengths, slots.clamp(min=0), rotations, share)
    output = local.output if keep is None else local.output * keep[..., None].to(local.output.dtype)
    return output + memory.to(output.dtype), share if return_mass else None


def _attend_one(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, slots: Tensor, rotations: Tensor, share: Tensor
) -> Tensor:
    """As `_attend_shared` for one sequence and one rotation, which is a decoding step: as few calls as will do."""
    index = slots[0, :, 0]  # (H, K)
    heads, k = index.shape
    unit_k, unit_v = keys[index].to(q.dtype).flatten(1, 2), values[index].to(q.dtype).flatten(1, 2)  # (H, K * l, D)
    s = accumulate(q[0, 0] @ unit_k.transpose(1, 2)).unflatten(-1, (k, -1))  # (H, T, K, l)
    s = _mask_lengths(s, lengths[index][:, None], keys.shape[1])
    weights = s.softmax(-1) * share[0, ..., None]  # (H, T, K, l)
    return (weights.flatten(2).to(q.dtype) @ unit_v)[None]


def _attend_shared(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, slots: Tensor, rotations: Tensor, share: Tensor
) -> Tensor:
    """Every row reads the same units of its head: slots [B, H, 1, K]."""
    batch, heads, _, k = slots.shape
    index = slots[:, :, 0]  # (B, H, K)
    unit_k, unit_v = keys[index].to(q.dtype), values[index].to(q.dtype)  # (B, H, K, l, D)
    b_index = torch.arange(batch, device=q.device)[:, None, None]
    h_index = torch.arange(heads, device=q.device)[None, :, None]
    rotated = q[rotations[:, :, 0], b_index, h_index]  # (B, H, K, T, D)
    s = accumulate(rotated @ unit_k.transpose(-1, -2))  # (B, H, K, T, l)
    s = _mask_lengths(s, lengths[index][:, :, :, None], keys.shape[1])
    weights = s.softmax(-1) * share.transpose(-1, -2)[..., None]  # (B, H, K, T, l)
    flat = weights.permute(0, 1, 3, 2, 4).flatten(3)  # (B, H, T, K * l)
    return flat.to(q.dtype) @ unit_v.flatten(2, 3)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, slots: Tensor, rotations: Tensor, share: Tensor
) -> Tensor:
    """Each row reads units of its own: only the rows with any mass are gathered."""
    slots, rotations = slots.expand_as(share), rotations.expand_as(share)
    output = q.new_zeros(q.shape[1:])
    active = (share > 0).any(-1)  # (B, H, T)
    if not active.any():
        return output
    index, mass = slots[active], share[active]  # (M, K)
    unit_k, unit_v = keys[index].to(q.dtype), values[index].to(q.dtype)  # (M, K, l, D)
    row = torch.arange(index.shape[0], device=q.device)[:, None]
    rotated = q[:, active].transpose(0, 1)[row, rotations[active]]  # (M, K, D)
    s = accumulate((unit_k @ rotated[..., None]).squeeze(-1))  # (M, K, l)
    s = _mask_lengths(s, lengths[index], keys.shape[1])
    weights = (s.softmax(-1) * mass[..., None]).to(q.dtype)
    output[active] = (weights.flatten(1)[:, None] @ unit_v.flatten(1, 2)).squeeze(1)
    return output


def _mask_lengths(s: Tensor, lengths: Tensor, block_size: int) -> Tensor:
    """Scores [..., l] with the padding of a document's closed last block masked; lengths has s's axes but the last."""
    if bool((lengths == block_size).all()):
        return s
    return s.masked_fill(torch.arange(block_size, device=s.device) >= lengths[..., None], NEG)
