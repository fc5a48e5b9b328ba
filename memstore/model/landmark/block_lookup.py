"""Lookup of blocks by the rows of a layer step, shared over tokens or heads (granularity), with
their leases and reads (docs/appendix/method.md section 5).

A candidate is a block's number in the session's memory, 0 = the oldest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.kernels.api import NEG
from memstore.model.lookup_settings import Granularity
from memstore.model.session import ReadUnit, StepReads
from memstore.tiers.slots import Lease


def lease_requested(
    lease: Callable[[list[BlockKey]], Lease],
    layer: int,
    candidates: Tensor,
    group: int,
    locate: Callable[[int], tuple[int, int]],
) -> tuple[Lease, Tensor]:
    """Lease the distinct units of candidates [H, T or 1, K]; also returns their slots in this shape
    (-1 = none). group: query heads of a KV head. locate: (document, block) of a candidate. In
    NumPy: a decoding step has few units, and calls of torch would cost more.
    """
    chosen = candidates.cpu().numpy()
    kv_heads = len(chosen) // group
    heads = np.arange(len(chosen)) // group
    units = np.where(chosen >= 0, chosen * kv_heads + heads[:, None, None], -1)
    distinct, inverse = np.unique(units, return_inverse=True)
    absent = int(len(distinct) > 0 and distinct[0] < 0)
    leased = lease(
        [
            BlockKey(document, layer, block, unit % kv_heads)
            for unit in distinct[absent:].tolist()
            for document, block in [locate(unit // kv_heads)]
        ]
    )
    slots = torch.nn.functional.pad(leased.slots, (absent, 0), value=-1)
    at = torch.from_numpy(inverse.reshape(units.shape)).to(slots.device)
    return leased, slots[at].to(candidates.device)


def requested_reads(
    layer: int,
    candidates: Tensor,
    row: int,
    mass: Tensor,
    slots: Tensor,
    lease: Lease,
    locate: Callable[[int], tuple[int, int]],
) -> StepReads:
    """Reads of one row. mass: [H, T, K]; slots: as returned by `lease_requested`."""
    own = min(row, candidates.shape[1] - 1)
    chosen = zip(candidates[:, own].tolist(), mass[:, row].tolist(), slots[:, own].tolist())
    read = [
        (head, candidate, weight, slot)
        for head, of_head in enumerate(chosen)
        for candidate, weight, slot in zip(*of_head)
        if candidate >= 0 and weight > 0
    ]
    units = [
        ReadUnit(layer, head, *locate(candidate), lease.fetched.get(slot, lease.tier))
        for head, candidate, _, slot in read
    ]
    return StepReads(units, np.array([weight for _, _, weight, _ in read]))


@dataclass(frozen=True)
class Selection:
    """Chosen candidates, oldest first: candidates int64 [H, T or 1, K], -1 = none; scores [H, T, K]
    per row, NEG for none.

    `scores` are search scores if every row chose for itself, else None: a row may then not have
    scored its block.
    """

    candidates: Tensor
    scores: Tensor | None


def merge(
    scores: Tensor, candidates: Tensor, recent_scores: Tensor, first_recent: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """The top_k of old hits [H, T, k] and all recent blocks [H, T, R], best first; of equals the
    newer wins.
    """
    if recent_scores.shape[-1] == 0:
        return scores, candidates
    last = first_recent + recent_scores.shape[-1]
    recent = torch.arange(first_recent, last, device=recent_scores.device).expand(
        recent_scores.shape
    )
    scores, candidates = torch.cat([scores, recent_scores], -1), torch.cat([candidates, recent], -1)
    newest = candidates.argsort(dim=-1, descending=True)
    scores, candidates = scores.gather(-1, newest), candidates.gather(-1, newest)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.values[..., :top_k], candidates.gather(-1, best.indices)[..., :top_k]


def select(
    granularity: Granularity,
    scores: Tensor,
    candidates: Tensor,
    lse: Tensor | None,
    open_rows: Tensor,
    num_kv_heads: int,
) -> Selection:
    """Choose each row's blocks from the best of its own search.

    scores, candidates: [H, T, k], best first (-1 = none). lse: [H, T] over all candidates, needed
    unless every row chooses for itself.
    open_rows: [H, T] bool; closed rows choose nothing and take no part in a maximum.

    A block among the top k of a maximum over rows is among the top k of the row that attains it, so
    the rows' own lists suffice.
    """
    heads, rows, k = scores.shape
    if granularity == "per_token_per_head":
        chosen = candidates.masked_fill(~open_rows[..., None], -1)
        order = torch.where(chosen < 0, torch.iinfo(torch.int64).max, chosen).argsort(dim=-1)
        return Selection(chosen.gather(-1, order), scores.gather(-1, order))
    assert lse is not None
    weight = (scores - lse[..., None]).masked_fill(~open_rows[..., None] | (candidates < 0), NEG)
    known, index = candidates.clamp(min=0).unique(return_inverse=True)
    dense = weight.new_full((heads, rows, len(known)), NEG)
    dense.scatter_reduce_(-1, index, weight, "amax", include_self=True)
    if granularity == "per_token":
        dense = dense.amax(0, keepdim=True)
    elif granularity == "per_head":
        dense = dense.amax(1, keepdim=True).view(num_kv_heads, heads // num_kv_heads, 1, -1).amax(1)
    else:
        dense = dense.amax((0, 1), keepdim=True)
    width = min(k, len(known))
    newest = dense.flip(-1).sort(dim=-1, descending=True, stable=True)
    chosen, best = known[len(known) - 1 - newest.indices[..., :width]], newest.values[..., :width]
    chosen = chosen.masked_fill(best <= NEG / 2, -1)
    if granularity == "per_head":
        chosen = chosen.repeat_interleave(heads // num_kv_heads, 0)
    order = torch.where(chosen < 0, torch.iinfo(torch.int64).max, chosen).argsort(dim=-1)
    return Selection(chosen.gather(-1, order).expand(heads, -1, -1), None)


def superseding(scores: Tensor, candidates: Tensor, documents: int, weight: float) -> Tensor:
    """Bonus [H, T, K] of chosen document blocks that are later than others of like score
    (docs/appendix/method.md section 5).

    scores: [H, T, K]; candidates: [H, T or 1, K], -1 = none; the first `documents` candidates are
    blocks of documents. weight: bonus of a block over a single earlier one of equal score.
    """
    of_documents = (candidates >= 0) & (candidates < documents)
    share = scores.masked_fill(candidates < 0, NEG).softmax(-1).masked_fill(~of_documents, 0.0)
    earlier = candidates[..., None, :] < candidates[..., :, None]
    alike = 2 * torch.minimum(share[..., None, :], share[..., :, None])
    return weight * (earlier * alike.square()).sum(-1)
