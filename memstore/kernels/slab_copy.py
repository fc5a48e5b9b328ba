"""Units from main memory to a device: slots of a page-locked slab to slots of a device's slab, on a
stream of their own: one copy for each run of slots that are consecutive on both sides, or, where
runs are many and short, one launch of a kernel that reads the page-locked slots itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memstore.kernels.dispatch import use_triton

# What an H200 takes (docs/appendix/kernels.md): 8 µs of the CPU a copy, 100 µs a launch with its
# list, as much as some 7 copies; runs of 516 KB come up by copies at .83 of the kernel's rate.
_SHORT = 1_000_000  # bytes of a run
_FEW = 7  # runs


@dataclass(frozen=True)
class Transfer:
    """Units on their way; there already where no CUDA device takes part (then `event` is None)."""

    event: torch.cuda.Event | None

    def finish(self) -> None:
        """Return when the units are there, and the host may write over what was loaded."""
        if self.event is not None:
            self.event.synchronize()


def load_units(
    host: Tensor,
    device: Tensor,
    from_slots: Sequence[int],
    to_slots: Sequence[int],
    *,
    triton: bool | None = None,
) -> Transfer:
    """Copy units from slots of a host's slab into slots of a device's, to_slots[i] from
    from_slots[i].

    host, device: [S, ...] contiguous, of one dtype, slots of one shape; the host's page-locked
    where the device's is on a CUDA device, else a copy blocks. No slot is named twice in to_slots.
    triton: whether by the kernel, which a host's slab has to be page-locked for; None for what is
    faster. Begins after what the device's current stream (of this thread) was given before, which
    may still read the slots that are written. The host's slab stays until the transfer is finished.
    """
    if not from_slots or not host.numel():
        return Transfer(None)
    places = np.array([from_slots, to_slots], dtype=np.int64)
    if not device.is_cuda:
        _copy(host, device, places, triton)
        return Transfer(None)
    stream = _stream(device.device)
    stream.wait_stream(torch.cuda.current_stream(device.device))
    with torch.cuda.stream(stream):
        _copy(host, device, places, triton)
        return Transfer(stream.record_event())


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # before others' work: the few programs of a kernel would wait until all of theirs have begun
    return torch.cuda.Stream(device, priority=-1)


def _copy(host: Tensor, device: Tensor, places: np.ndarray, triton: bool | None) -> None:
    """places: int64 [2, n], from where and to where."""
    count = places.shape[1]
    starts = [0, *run_ends(places)]
    if triton is None:
        triton = (
            by_kernel(len(starts), count * (host.nbytes // len(host)))
            and use_triton(device)
            and (host.is_pinned() or not device.is_cuda)
        )
    if triton:
        from memstore.kernels.triton_slab_copy import copy_units

        copy_units(host, device, places)
    elif device.is_cuda:
        for start, end in pairwise([*starts, count]):
            source, target = places[:, start].tolist()
            taken = host[source : source + end - start]
            device[target : target + end - start].copy_(taken, non_blocking=True)
    else:
        taken, given = torch.from_numpy(places)
        device.index_copy_(
            0, given.to(device.device), host.index_select(0, taken).to(device.device)
        )


def by_kernel(runs: int, size: int) -> bool:
    """Are so many runs of so many bytes in all copied faster by a kernel than run by run?"""
    return runs > _FEW and size < runs * _SHORT


def run_ends(places: np.ndarray) -> list[int]:
    """Where the longest runs of slots that are consecutive on both sides end, but for the last.
    places: int64 [2, n].
    """
    ends: list[int] = (np.flatnonzero((np.diff(places) != 1).any(0)) + 1).tolist()
    return ends
