"""The device tier: slots in a device's memory, filled from the host tier."""

from collections.abc import Sequence

import torch

from memstore.block import BlockKey
from memstore.errors import InvalidConfig
from memstore.tiers.host import HostTier
from memstore.tiers.slab import SlabTier


class DeviceTier(SlabTier):
    """Slots on a torch device such as "cuda" ("cpu" is taken too: the same tier without the other
    memory).

    A slot may be filled anew as soon as its lease is released, by any thread. The copy then waits
    for what the filling thread's current stream was given before, so every thread must read slots
    on the same: the device's default stream.
    """

    name = "device"

    def __init__(
        self,
        host: HostTier,
        budget_bytes: int,
        *,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        policy: str = "lru",
    ) -> None:
        """As SlabTier. Raises InvalidConfig for a device that this machine does not have."""
        self._host = host
        super().__init__(
            budget_bytes,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
            policy=policy,
            device=usable_device(device),
        )

    def _read_below(
        self, units: Sequence[BlockKey], slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        return self._host.lift(units, self.slab, slots)


def usable_device(device: str) -> torch.device:
    """The device of that name. Raises InvalidConfig for one that this machine does not have."""
    try:
        place = torch.empty(1, device=device).device
        if place.type == "meta":
            raise RuntimeError("it holds no data")
    # torch has no error of its own for this
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0][:150]
        raise InvalidConfig(
            f"device {device!r} cannot be used here ({reason}); choose cuda or cpu"
        ) from error
    return place
