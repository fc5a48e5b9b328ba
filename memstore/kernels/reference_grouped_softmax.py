"""Grouped-softmax attention in plain torch, in the adjusted-logit form of docs/appendix/method.md:
any dtype, differentiable by autograd.

Softmaxes and logsumexps run in float32 at least, whatever the input dtype; float64 stays float64.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.products import accumulate, scores, weighted
from memstore.kernels.types import NEG, LocalAttention


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
    logits, _, null = adjusted_logits(q, k, block_size, k_cmt, controlled)
    flat = logits.flatten(-2)
    content = flat.shape[-1]
    weights = (flat if null is None else torch.cat([flat, null[..., None]], -1)).softmax(-1)
    return weighted(weights[..., :content], _content(v, block_size))


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


def _content(v: Tensor, block_size: int) -> Tensor:
    """Values [B, H, S, D] of a run of blocks without its landmarks, the last block padded with
    zeros: [B, H, nb * l, D].
    """
    b = block_size + 1
    missing = -v.shape[2] % b
    if missing:
        v = F.pad(v, (0, 0, 0, missing))
    return v.unflatten(2, (-1, b))[:, :, :, :block_size].flatten(2, 3)
