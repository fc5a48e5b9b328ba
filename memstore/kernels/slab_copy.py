"""Units from main memory to a device: slots of a page-locked slab to slots of a device's slab, on a
stream of their own: one copy for each run of slots that are consecutive on both sides, or, where
runs are many and short, one launch of a kernel that reads the page-locked slots itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memstore.kernels.api import use_triton

# What an H200 takes (docs/appendix/kernels.md): 8 µs of the CPU a copy, 100 µs a launch with its
# list, as much as some 7 copies; runs of 516 KB come up by copies at .83 of the kernel's rate.
_SHORT = 1_000_000  # bytes of a run
_FEW = 7  # runs


def load_units(
    host: Tensor,
    device: Tensor,
    from_slots: Sequence[int],
    to_slots: Sequence[int],
    *,
    triton: bool | None = None,
) -> torch.cuda.Event | None:
    """Copy units from slots of a host's slab into slots of a device's, to_slots[i] from
    from_slots[i].

    host, device: [S, ...] contiguous, of one dtype, slots of one shape; the host's page-locked
    where the device's is on a CUDA device, else a copy blocks. No slot is named twice in to_slots.
    triton: whether by the kernel, which a host's slab has to be page-locked for; None for what is
    faster. Begins after what the device's current stream (of this thread) was given before, which
    may still read the slots that are written. Returns what to wait for before the units are used or
    the host's slab is written; None where they are there already.
    """
    if not from_slots or not host.numel():
        return None
    places = np.array([from_slots, to_slots], dtype=np.int64)
    if not device.is_cuda:
        _copy(host, device, places, triton)
        return None
    stream = _stream(device.device)
    stream.wait_stream(torch.cuda.current_stream(device.device))
    with torch.cuda.stream(stream):
        _copy(host, device, places, triton)
        return stream.record_event()


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # before others' work: the few programs of a kernel would wait until all of theirs have begun
    return torch.cuda.Stream(device, priority=-1)


def _copy(host: Tensor, device: Tensor, places: np.ndarray, triton: bool | None) -> None:
    """places: int64 [2, n], from where and to where."""
    count = places.shape[1]
    # where runs of slots that are consecutive on both sides begin
    starts = [0, *(np.flatnonzero((np.diff(places) != 1).any(0)) + 1).tolist()]
    if triton is None:
        short = count * (host.nbytes // len(host)) < len(starts) * _SHORT
        reachable = host.is_pinned() or not device.is_cuda
        triton = len(starts) > _FEW and short and reachable and use_triton(device)
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
