"""Attention to retrieved units in plain torch: their slots are gathered and attended to."""

import torch
from torch import Tensor

from memstore.kernels.products import accumulate
from memstore.kernels.types import NEG, LocalAttention


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
