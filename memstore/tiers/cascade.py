"""The tiers of a memory as one: lookups go to the top, misses are read from below, and every tier
but the disk is a cache.

    device (optional)  ->  host  ->  disk, or memstore.share for a published memory

The caches are inclusive: units of the device tier came through the host tier, which may have
evicted them since. A session's own blocks are pinned in the host tier until they are committed or
the session ends.
"""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.tiers.prefetch import Prefetcher
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Lease, LowestTier, UnitShape
from memstore.tiers.stats import TierCounter
from memstore.tiers.tier_options import (
    DEFAULT_POLICY,
    HOST_BUDGET,
    Predictor,
    TierOptions,
    check_options,
)


class Cascade:
    """A disk tier with a host tier and perhaps a device tier above it, and a prefetcher."""

    def __init__(
        self,
        disk: LowestTier,
        shape: UnitShape,
        *,
        computes: bool = False,
        **options: Unpack[TierOptions],
    ) -> None:
        """computes: do sessions compute units that no tier has? Raises BudgetExceeded,
        InvalidConfig.
        """
        check_options(options)
        policy = options.get("policy", DEFAULT_POLICY)
        self.disk = disk
        budget = options.get("host_budget", HOST_BUDGET)
        self.host = SlabTier("host", disk, budget, shape, policy=policy)
        self.device, device = None, options.get("device")
        if device is not None:
            budget = options.get("device_budget", HOST_BUDGET)
            place = usable_device(device)
            self.device = SlabTier("device", self.host, budget, shape, policy=policy, device=place)
        self.top = self.host if self.device is None else self.device
        self.predictor: Predictor = options.get("prefetch", "off")
        self.prefetcher = Prefetcher(self.top)
        self._computes, self._computed = computes, TierCounter()

    def close(self) -> None:
        """End all threads; idempotent."""
        self.prefetcher.close()
        self.disk.close()

    # Reading

    def lease(self, units: Sequence[BlockKey]) -> Lease:
        """Slots of the top tier that hold these units: see SlabTier.lease."""
        return self.top.lease(units)

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Prefetch units that will probably be looked up soon; return at once how many are not
        held.
        """
        absent = [unit for unit in units if not self.top.holds(unit)]
        if absent:
            self.prefetcher.request(absent)
        return len(absent)

    # Units of sessions

    def admit(self, units: Sequence[BlockKey], k: Tensor, v: Tensor, length: int) -> None:
        """Hold units that a session computed in the host tier: see SlabTier.admit."""
        self.host.admit(units, k, v, length)

    def count_computed(self, units: int, size: int, seconds: float) -> None:
        """Count units of `size` bytes that a session computed in so many seconds, as hits of a
        lowest tier.
        """
        self._computed.count(hits=units, bytes=size, seconds=seconds)

    def drop(self, units: Sequence[BlockKey]) -> None:
        """Drop units from all caches."""
        self.host.drop(units)  # first: a lookup in between would bring them up from here again
        if self.device is not None:
            self.device.drop(units)

    def drop_document(self, document: int) -> None:
        """Drop a document from all caches."""
        self.host.drop_document(document)  # first, as in drop
        if self.device is not None:
            self.device.drop_document(document)

    # Counting

    @property
    def caches(self) -> list[SlabTier]:
        """The tiers above the disk, top first."""
        return [self.host] if self.device is None else [self.device, self.host]

    def stats(self) -> dict[str, dict[str, int | float]]:
        """The counts of each tier, top first, and what the caches hold."""
        tiers: dict[str, dict[str, int | float]] = {
            tier.name: {**tier.stats().to_dict(), "held": tier.bytes, "budget": tier.budget_bytes}
            for tier in self.caches
        }
        for name, counter in self.disk.counters.items():
            tiers[name] = dict(counter.snapshot().to_dict())
            failures = counter.failures()
            if failures:
                tiers[name]["failed"] = sum(failures.values())
                tiers[name] |= {f"failed_{reason}": n for reason, n in failures.items()}
        if self._computes:
            tiers["computed"] = dict(self._computed.snapshot().to_dict())
        return tiers
