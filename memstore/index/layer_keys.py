"""Keys of one layer in one tensor that grows, and which rows of it are whose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memstore.index.block_rows import Remembered, Rows


@dataclass
class Layer:
    """One layer's keys in rows, and what was looked up in them since they last changed."""

    keys: Tensor  # (Hkv, capacity, D)
    rows: Rows = field(default_factory=Rows)
    scopes: Remembered = field(default_factory=Remembered)

    def add(self, document: int, first_block: int, keys: Tensor) -> None:
        """Append keys [n, Hkv, D]."""
        self.rows.append(document, first_block, len(keys))  # raises before anything is written
        self._write(keys)

    def add_new(self, documents: Sequence[tuple[int, int]], keys: Tensor) -> None:
        """Append keys [n, Hkv, D] of documents (document, blocks) that have none yet."""
        self.rows.append_new(documents)
        self._write(keys)

    def _write(self, keys: Tensor) -> None:
        """Write the keys of the newest rows."""
        n = len(keys)
        start = self.rows.end - n
        if self.rows.end > self.keys.shape[1]:
            holes = 2 * self.rows.live < self.rows.end
            self._move(start, (self.rows.live if holes else self.rows.end) * 3 // 2 + 64, holes)
            start = self.rows.end - n
        self.keys[:, start : start + n] = keys.transpose(0, 1)

    def reserve(self, n: int) -> None:
        """Make room for n more keys at once."""
        if self.rows.end + n > self.keys.shape[1]:
            # and for a few that come later: to move all for them takes seconds
            self._move(self.rows.end, (self.rows.end + n) * 17 // 16 + 64, False)

    def _move(self, written: int, room: int, holes: bool) -> None:
        """Move into new tensors, unnoticed by a thread that searches the old ones; with `holes`,
        those are left out.
        """
        old, rows = self.keys, self.rows
        n = rows.end - written
        moved = Rows()
        self.keys = _empty((old.shape[0], room, old.shape[2]), old.dtype, old.device)
        if not holes:
            self.keys[:, :written] = old[:, :written]
        else:
            for document, run in rows.all():
                start = run.start
                stop = min(start + run.size, written)  # the newest rows are not written yet
                self.keys[:, moved.end : moved.end + stop - start] = old[:, start:stop]
                moved.append(document, run.first_block, run.size)
            # The newest rows are the last of the last run: they stay last.
            assert moved.end >= n
            self.rows = moved


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the CPU by way of NumPy, which asks for huge pages: their first
    use is cheaper.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(shape)
