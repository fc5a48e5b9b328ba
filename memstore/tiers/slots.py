"""The memory of a tier: equal slots in one slab, each for the keys and values of a unit."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class UnitShape(NamedTuple):
    """What a slot has room for: keys and values [block_size, head_dim] in a dtype."""

    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.block_size * self.head_dim * self.dtype.itemsize


class Slots:
    """Slots on a device.

    slab: [S, 2, block_size, head_dim] in the KV dtype, K before V as in a record; k, v: its halves,
    [S, block_size, head_dim]; lengths: int64 [S], valid content tokens of the unit in a slot;
    lengths_here: the same in main memory, so that leases tell theirs without asking the device.
    Slots that never held a unit cost no main memory.
    """

    def __init__(
        self,
        count: int,
        shape: UnitShape,
        *,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """pin_memory: page-locked, for copies to a CUDA device. Raises RuntimeError or MemoryError
        where the machine refuses the memory.
        """
        block_size, head_dim, dtype = shape
        of_slab = (count, 2, block_size, head_dim)
        if pin_memory or torch.device(device).type != "cpu":
            self.slab = torch.empty(of_slab, dtype=dtype, device=device, pin_memory=pin_memory)
        else:  # NumPy asks for huge pages, whose first use takes a third of the time
            memory = np.empty(count * shape.bytes, dtype=np.uint8)
            self.slab = torch.from_numpy(memory).view(dtype).view(of_slab)
        self.k, self.v = self.slab.unbind(1)
        if torch.device(device).type == "cpu":  # zeros that are not written before a unit comes
            self.lengths: Tensor = torch.from_numpy(np.zeros(count, dtype=np.int64))
            self.lengths[:1] = block_size  # attention looks there for a unit that has no slot
            self.lengths_here = self.lengths
        else:
            self.lengths = torch.full((count,), block_size, dtype=torch.int64, device=device)
            self.lengths_here = torch.full((count,), block_size, dtype=torch.int64)
        self._lengths = self.lengths_here.numpy()

    def note_lengths(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Write down the lengths of the units that came into slots. All blocks but a document's
        last are full, so a device is seldom told anything.
        """
        where, new = np.array(slots, dtype=np.int64), np.array(lengths, dtype=np.int64)
        changed = self._lengths[where] != new
        if changed.any():
            where, new = where[changed], new[changed]
            self._lengths[where] = new
            if self.lengths is not self.lengths_here:
                there = self.lengths.device
                self.lengths[torch.from_numpy(where).to(there)] = torch.from_numpy(new).to(there)
