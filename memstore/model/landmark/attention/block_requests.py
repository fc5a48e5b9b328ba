"""Block requests of a layer step: the KV blocks of heads that rows chose, the distinct ones leased
together, and what was read of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.model.reads import ReadUnit, StepReads
from memstore.tiers.lease import Lease

_FEW = 256  # units of a step that are looked up without tensors

Locate = Callable[[int], tuple[int, int]]
"""(document, block) of a candidate."""


@dataclass(frozen=True)
class BlockRequest:
    """What rows chose: candidates [h, T or 1, K] (-1 = none) of a layer's query heads from
    first_head on, `group` of them to a KV head.
    """

    layer: int
    candidates: Tensor
    first_head: int
    group: int

    def part(self, rows: slice) -> "BlockRequest":
        """The same of some rows."""
        return BlockRequest(self.layer, self.candidates[:, rows], self.first_head, self.group)


def lease_requested(
    lease: Callable[[list[BlockKey]], Lease], wanted: BlockRequest, locate: Locate
) -> tuple[Lease, Tensor]:
    """A lease on the distinct units that are wanted, and their slots in the candidates' shape (-1 =
    none).
    """
    candidates, group = wanted.candidates, wanted.group
    if candidates.numel() <= _FEW:
        return _lease_few(lease, wanted, locate)
    head = torch.arange(len(candidates), device=candidates.device)[:, None, None]
    kv_head = (head + wanted.first_head) // group
    kv_heads = (wanted.first_head + len(candidates) - 1) // group + 1  # those below it are enough
    present = candidates >= 0
    units, inverse = torch.where(present, candidates * kv_heads + kv_head, -1).unique(
        return_inverse=True
    )
    absent = int(len(units) > 0 and units[0] < 0)
    leased = lease(
        [
            BlockKey(document, wanted.layer, block, unit % kv_heads)
            for unit in units[absent:].tolist()
            for document, block in [locate(unit // kv_heads)]
        ]
    )
    slots = torch.nn.functional.pad(leased.slots, (absent, 0), value=-1).to(inverse.device)
    return leased, slots[inverse]


def _lease_few(
    lease: Callable[[list[BlockKey]], Lease], wanted: BlockRequest, locate: Locate
) -> tuple[Lease, Tensor]:
    """The same without tensors: a decoding step has few units, and every call costs more than the
    units do.
    """
    candidates, group = wanted.candidates, wanted.group
    chosen = [
        (candidate, head // group) if candidate >= 0 else None
        for head, of_head in enumerate(candidates.flatten(1).tolist(), wanted.first_head)
        for candidate in of_head
    ]
    units: dict[tuple[int, int] | None, int] = dict.fromkeys(chosen, -1)
    distinct = [unit for unit in units if unit is not None]
    leased = lease(
        [
            BlockKey(document, wanted.layer, block, head)
            for candidate, head in distinct
            for document, block in [locate(candidate)]
        ]
    )
    if len(distinct) == len(chosen):
        return leased, leased.slots.to(candidates.device).view(candidates.shape)
    units.update(zip(distinct, leased.held))
    slots = torch.tensor([units[unit] for unit in chosen], device=candidates.device)
    return leased, slots.view(candidates.shape)


def requested_reads(
    wanted: BlockRequest, row: int, mass: Tensor, slots: Tensor, lease: Lease, locate: Locate
) -> StepReads:
    """What one row read: mass [h, T, K] by row, slots as `lease_requested` gave them."""
    own = min(row, wanted.candidates.shape[1] - 1)
    chosen = zip(wanted.candidates[:, own].tolist(), mass[:, row].tolist(), slots[:, own].tolist())
    read = [
        (head, candidate, weight, slot)
        for head, of_head in enumerate(chosen, wanted.first_head)
        for candidate, weight, slot in zip(*of_head)
        if candidate >= 0 and weight > 0
    ]
    units = [
        ReadUnit(wanted.layer, head, *locate(candidate), lease.fetched.get(slot, lease.tier))
        for head, candidate, _, slot in read
    ]
    return StepReads(units, np.array([weight for _, _, weight, _ in read]))
