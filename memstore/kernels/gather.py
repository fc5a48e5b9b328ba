"""Units between main memory and a device: slots of a page-locked slab to slots of a device's slab and back, on a stream
of their own, beside what the device computes.

Two ways, of which benchmarks/kernels_memory.py says which is faster on a device: `copies`, one for each run of slots
that are consecutive on both sides; `kernel`, one Triton kernel that reads or writes the page-locked memory itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Slabs = tuple[Tensor, Tensor]
"""Keys and values of units, [S, block_size, D] each, contiguous."""
Way = Literal["copies", "kernel"]


@dataclass(frozen=True)
class Transfer:
    """Units on their way; there already where no CUDA device takes part (then `event` is None)."""

    event: torch.cuda.Event | None

    def order(self) -> None:
        """What is given to the device from now on begins when the units are there."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream())

    def finish(self) -> None:
        """Return when the units are there: before the host reads what was saved, or writes what was loaded over."""
        if self.event is not None:
            self.event.synchronize()


def load_units(
    host: Slabs, device: Slabs, from_slots: Sequence[int], to_slots: Sequence[int], *, by: Way = "copies"
) -> Transfer:
    """Copy units from slots of a host's slabs into slots of a device's, to_slots[i] from from_slots[i].

    host: page-locked where `device` is on a CUDA device, else a copy blocks. No slot is named twice in to_slots. Begins
    after what was given to the device before.
    """
    return _move(host, device, device[0].device, from_slots, to_slots, by)


def save_units(
    device: Slabs, host: Slabs, from_slots: Sequence[int], to_slots: Sequence[int], *, by: Way = "copies"
) -> Transfer:
    """The other way, for blocks that a model has finished: as `load_units`, from a device's slabs to a host's."""
    return _move(device, host, device[0].device, from_slots, to_slots, by)


def _move(
    source: Slabs, target: Slabs, device: torch.device, from_slots: Sequence[int], to_slots: Sequence[int], by: Way
) -> Transfer:
    if not from_slots:
        return Transfer(None)
    if device.type != "cuda":
        taken, given = torch.tensor(from_slots, device=device), torch.tensor(to_slots, device=device)
        for x, y in zip(source, target):
            y.index_copy_(0, given, x.index_select(0, taken))
        return Transfer(None)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        if by == "kernel":
            from memstore.kernels.copy_units import copy_units

            copy_units(source, target, from_slots, to_slots, device)
        else:
            for start, end, to in runs(from_slots, to_slots):
                for x, y in zip(source, target):
                    y[to : to + end - start].copy_(x[start:end], non_blocking=True)
        return Transfer(stream.record_event())


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def runs(from_slots: Sequence[int], to_slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, end, first target) of the longest runs of slots that are consecutive on both sides."""
    found: list[tuple[int, int, int]] = []
    for source, target in zip(from_slots, to_slots, strict=True):
        if found and found[-1][1] == source and found[-1][2] + source - found[-1][0] == target:
            found[-1] = (found[-1][0], source + 1, found[-1][2])
        else:
            found.append((source, source + 1, target))
    return found
