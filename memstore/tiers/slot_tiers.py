"""The tiers with slots: the host tier in main memory, which attention on the CPU reads, and a
device tier that is filled from it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.errors import BudgetExceeded, DocumentNotFound
from memstore.kernels.slab_copy import load_units
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Held, LowestTier, UnitShape


class HostTier(SlabTier):
    """Slots in main memory, page-locked where there is a CUDA device to copy to. Pinned units (a
    session's own and not yet committed blocks, which no source below has) live here.
    """

    name = "host"

    def __init__(
        self, source: LowestTier | None, budget_bytes: int, shape: UnitShape, *, policy: str = "lru"
    ) -> None:
        """source: what misses are read from; None for a memory that stores nothing. Otherwise as
        SlabTier.
        """
        self.source = source
        super().__init__(budget_bytes, shape, policy=policy, pin_memory=torch.cuda.is_available())

    def _read_below(
        self, units: Sequence[BlockKey], slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        if self.source is None:
            raise DocumentNotFound(
                f"document {units[0].document} is not in this memory, which holds only its "
                "sessions' own blocks"
            )
        return self.source.read_from(units, self.slab, slots)

    def lift(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """Copy units into slots of the slab of a tier above, in groups that fit in this one; of
        each its length and the name of the tier that had it.

        Raises BudgetExceeded if not even one unit fits, and what `lease` raises.
        """
        lengths: list[int] = []
        tiers: list[str] = []
        group = max(1, self.capacity // 2)
        while len(lengths) < len(units):
            start = len(lengths)
            end = min(start + group, len(units))
            try:
                lease = self.lease(units[start:end])
            except BudgetExceeded:
                if end - start == 1:
                    raise
                group = (end - start) // 2  # much is pinned
                continue
            there = [
                slot
                for held, some in zip(lease.of_units, slots[start:end])
                for slot in some[: len(held)]
            ]
            with lease:  # until the copy is done: after that others may write over these slots
                load_units(self.slab, slab, lease.held, there).finish()
                lengths += lease.lengths.tolist()
                tiers += lease.tiers
        return lengths, tiers


class DeviceTier(SlabTier):
    """Slots on a torch device such as "cuda", or "cpu" in tests.

    Any thread may refill a slot as soon as its lease is released. The copy waits for earlier work
    on the filling thread's current stream, so every thread must read slots on the device's default
    stream.
    """

    name = "device"

    def __init__(
        self,
        host: HostTier,
        budget_bytes: int,
        shape: UnitShape,
        *,
        device: str,
        policy: str = "lru",
    ) -> None:
        """As SlabTier. Raises InvalidConfig for a device that this machine does not have."""
        self._host = host
        super().__init__(budget_bytes, shape, policy=policy, device=usable_device(device))

    def _read_below(
        self, units: Sequence[BlockKey], slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        return self._host.lift(units, self.slab, slots)
