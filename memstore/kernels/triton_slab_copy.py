"""Copy of scattered units from page-locked main memory to a device by one launch: programs read the
page-locked slots over the bus and write the device's slots.
"""

from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 fill the bus of an H200 (.92 of it; 4 .57): few, since multiprocessors are for what computes
# meanwhile. Twice that, for a bus that is faster.
_PROGRAMS = 16
_CHUNK = 16384  # bytes that a program asks for at once, 64 a thread
_WARPS = 8
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["units"])  # or whether 16 divide it would be another kernel
def _copy_kernel(host, device, slots, units, size, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (programs); programs take chunks of units in turn. slots: [2, units], source and target;
    a slot has size * WIDTH words.
    """
    words = size * WIDTH
    chunks = tl.cdiv(words, CHUNK)
    for piece in range(tl.program_id(0), units * chunks, tl.num_programs(0)):
        unit = piece // chunks
        word = piece % chunks * CHUNK + tl.arange(0, CHUNK)
        source = host + tl.load(slots + unit) * words
        target = device + tl.load(slots + units + unit) * words
        read = tl.load(source + word, mask=word < words, eviction_policy="evict_first")
        tl.store(target + word, read, mask=word < words)


def copy_units(host: Tensor, device: Tensor, places: np.ndarray) -> None:
    """Copy slots of a page-locked slab into slots of a device's, on its current stream.

    host, device: as for `memstore.kernels.slab_copy.load_units`; places: int64 [2, n], source and
    target slots.
    """
    size = host.nbytes // len(host)
    aligned = gcd(16, size, host.data_ptr(), device.data_ptr())
    word = min(aligned, 8)
    width = aligned // word  # 2 where a thread may read 16 bytes at once
    slots = torch.from_numpy(places)
    if device.is_cuda:
        # both copies live as long as needed: torch keeps a page-locked one until it was read, and
        # gives the other's memory to work of this stream only
        slots = slots.pin_memory().to(device.device, non_blocking=True)
    chunk = min(_CHUNK // word, triton.next_power_of_2(size // word))
    units = places.shape[1]
    _copy_kernel[(min(_PROGRAMS, units * triton.cdiv(size // word, chunk)),)](
        host.view(-1).view(_WORDS[word]), device.view(-1).view(_WORDS[word]), slots, units,
        size // aligned, WIDTH=width, CHUNK=chunk, num_warps=_WARPS,
    )  # fmt: skip
