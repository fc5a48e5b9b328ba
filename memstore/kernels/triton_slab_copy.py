"""Copying units between slabs in one Triton kernel, of which one side may be page-locked main
memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words of a unit that one program copies


@triton.jit
def _copy_kernel(slab_in, slab_out, sources, targets, words, BLOCK: tl.constexpr):
    """Grid (units, parts of a unit). Slabs of `words` words a unit."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + tl.program_id(0)) * words
    target = tl.load(targets + tl.program_id(0)) * words
    tl.store(
        slab_out + target + at, tl.load(slab_in + source + at, mask=at < words), mask=at < words
    )


def copy_units(
    source: Tensor,
    target: Tensor,
    from_slots: Sequence[int],
    to_slots: Sequence[int],
    device: torch.device,
) -> None:
    """Copy units slot by slot, as `memstore.kernels.slab_copy.load_units` says, on the current
    stream of `device`.

    source, target: slabs [S, ...], contiguous, each on the device or in page-locked memory.
    """
    slab_in, slab_out = _words(source), _words(target)
    slots = torch.tensor([from_slots, to_slots], dtype=torch.int64).to(device, non_blocking=True)
    words = slab_in.shape[1]
    grid = (len(from_slots), triton.cdiv(words, _BLOCK))
    _copy_kernel[grid](slab_in, slab_out, slots[0], slots[1], words, BLOCK=_BLOCK)


def _words(slab: Tensor) -> Tensor:
    """A slab as integers of four bytes, or of fewer where a unit does not divide so."""
    flat = slab.flatten(1)
    size = flat.shape[1] * flat.itemsize
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8)
