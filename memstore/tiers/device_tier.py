"""The device tier: slots in a device's memory, filled from the host tier."""

from collections.abc import Sequence

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.tiers.host_tier import HostTier
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import UnitShape


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
        self, units: Sequence[BlockKey], slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        return self._host.lift(units, self.slab, slots)
