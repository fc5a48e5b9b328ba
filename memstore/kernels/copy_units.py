"""Copying units between slabs in one Triton kernel, of which one side may be page-locked main memory."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words of a unit that one program copies


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    k_in, v_in, k_out, v_out, sources, targets, words, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (units, parts of a unit). Slabs of `words` words a unit."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + tl.program_id(0)) * words
    target = tl.load(targets + tl.program_id(0)) * words
    k = tl.load(k_in + source + at, mask=at < words)
    v = tl.load(v_in + source + at, mask=at < words)
    tl.store(k_out + target + at, k, mask=at < words)
    tl.store(v_out + target + at, v, mask=at < words)


def copy_units(
    source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], from_slots: Sequence[int], to_slots: Sequence[int],
    device: torch.device,
) -> None:  # fmt: skip
    """Copy units slot by slot, as `memstore.kernels.gather.load_units` says, on `device`'s current stream.

    source, target: slabs [S, block_size, D], each on the device or in page-locked memory.
    """
    k_in, v_in, k_out, v_out = (_words(slab) for slab in (*source, *target))
    slots = torch.tensor([from_slots, to_slots], dtype=torch.int64).to(device, non_blocking=True)
    words = k_in.shape[1]
    grid = (len(from_slots), triton.cdiv(words, _BLOCK))
    _copy_kernel[grid](k_in, v_in, k_out, v_out, slots[0], slots[1], words, BLOCK=_BLOCK)


def _words(slab: Tensor) -> Tensor:
    """A slab as integers of four bytes, or of fewer where a unit does not divide so."""
    flat = slab.flatten(1)
    size = flat.shape[1] * flat.itemsize
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8)
