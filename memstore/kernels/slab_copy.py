"""Copies of units from a page-locked slab in main memory to a device's slab, on their own stream:
one copy for each run of slots consecutive on both sides or, for many short runs, one launch of a
kernel that reads the page-locked slots.
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

    host, device: [S, ...] contiguous, equal dtypes and slot shapes; host must be page-locked for an
    asynchronous copy to CUDA. to_slots: no slot twice. triton: use the kernel, which needs a
    page-locked host slab? None: the faster way. The copy begins after earlier work of this thread's
    current stream, which may still read the written slots. Returns an event to wait for before the
    units are used or the host slab is written; None if the copy is done.
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
    """places: int64 [2, n], source and target slots."""
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
