"""Units from main memory to a device: slots of a page-locked slab to slots of a device's slab, on a
stream of their own: one copy for each run of slots that are consecutive on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """Units on their way; there already where no CUDA device takes part (then `event` is None)."""

    event: torch.cuda.Event | None

    def finish(self) -> None:
        """Return when the units are there, and the host may write over what was loaded."""
        if self.event is not None:
            self.event.synchronize()


def load_units(
    host: Tensor, device: Tensor, from_slots: Sequence[int], to_slots: Sequence[int]
) -> Transfer:
    """Copy units from slots of a host's slab into slots of a device's, to_slots[i] from
    from_slots[i].

    host, device: [S, ...] contiguous, of one dtype, slots of one shape; the host's page-locked
    where the device's is on a CUDA device, else a copy blocks. No slot is named twice in to_slots.
    Begins after what the device's current stream (of this thread) was given before, which may still
    read the slots that are written.
    """
    if not from_slots:
        return Transfer(None)
    if not device.is_cuda:
        taken = torch.tensor(from_slots, device=host.device)
        given = torch.tensor(to_slots, device=device.device)
        device.index_copy_(0, given, host.index_select(0, taken).to(device.device))
        return Transfer(None)
    stream = _stream(device.device)
    stream.wait_stream(torch.cuda.current_stream(device.device))
    with torch.cuda.stream(stream):
        for start, end, to in runs(from_slots, to_slots):
            device[to : to + end - start].copy_(host[start:end], non_blocking=True)
        return Transfer(stream.record_event())


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def runs(from_slots: Sequence[int], to_slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, end, first target) of the longest runs of slots that are consecutive on both
    sides.
    """
    found: list[tuple[int, int, int]] = []
    for source, target in zip(from_slots, to_slots, strict=True):
        if found and found[-1][1] == source and found[-1][2] + source - found[-1][0] == target:
            found[-1] = (found[-1][0], source + 1, found[-1][2])
        else:
            found.append((source, source + 1, target))
    return found
