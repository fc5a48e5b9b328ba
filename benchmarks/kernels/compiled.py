"""What do the kernels compile to, for a GPU that need not be here: registers, shared memory and
spilled bytes, as its assembler reports them?

What they take on one is measured by `benchmarks.gpu` (`--parts retrieval softmax`).

    python -m benchmarks.kernels.compiled
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.kernels.ahead_of_time import compiled
from benchmarks.kernels.windows import Windows
from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention
from memstore.kernels.triton_landmark_topk import landmark_topk
from memstore.kernels.triton_memory_attention import memory_attention
from memstore.kernels.triton_slab_copy import copy_units
from memstore.kernels.types import LocalAttention

KV_HEADS, HEADS, BLOCK = 8, 32, 63


def inference() -> Iterator[dict[str, Any]]:
    """Every kernel at the sizes that matter, compiled by launches that do not run."""

    def described(work: Callable[[], object], what: str, dim: int) -> Iterator[dict[str, Any]]:
        with compiled() as found:
            work()
        for kernel in found:
            yield {"kernel": kernel.name[1:], "for": what, "head dim": dim} | kernel.resources

    for dim in (64, 128):
        slab = torch.zeros(64, BLOCK, dim).half()
        lengths = torch.full((64,), BLOCK)
        for rows, alike, dtype, k in (
            (1, False, torch.float16, 4),
            (1, False, torch.float32, 4),
            (256, True, torch.float16, 4),
            (256, True, torch.float16, 64),
        ):
            q = torch.zeros(1, 1, HEADS, rows, dim, dtype=dtype)
            slots = torch.zeros(1, HEADS, 1 if alike else rows, k, dtype=torch.int64)
            marks, gate = torch.zeros(1, HEADS, rows, k, dtype=dtype), torch.ones(1, HEADS, rows)
            local = LocalAttention(q[0], gate, gate)
            given = (q, slab, slab, lengths, slots, torch.zeros_like(slots), marks, local)
            what = f"{rows} tokens, {k} blocks{' alike' if alike else ''}, {str(dtype)[6:]}"
            yield from described(partial(memory_attention, *given, gated=True), what, dim)
        for dtype, rows, k in (
            (torch.float16, 1, 4),
            (torch.float16, 1, 64),
            (torch.float16, 256, 4),
            (torch.float16, 256, 64),
            (torch.float32, 1, 4),
            (torch.float32, 256, 4),
        ):
            keys = torch.zeros(KV_HEADS, 1 << 16, dim, dtype=dtype)
            q = torch.zeros(HEADS, rows, dim, dtype=dtype)
            what = f"{rows} tokens, best {k}, {str(dtype)[6:]}"
            work = partial(landmark_topk, q, keys, [(0, keys.shape[1])], k, return_lse=True)
            yield from described(work, what, dim)
        units = torch.zeros(64, 2, BLOCK, dim, dtype=torch.float16)
        copy = partial(copy_units, units, units, np.zeros((2, 32), dtype=np.int64))
        yield from described(copy, "32 units, float16", dim)


def training(blocks: Sequence[int], dims: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Grouped softmax, forward and backward."""
    for size, dim in product(blocks, dims):
        for gated, packed in ((False, False), (True, False), (True, True)):
            rows, others = Windows(size, 1024, dim, 2, 1, "cpu", gated, packed).tensors()
            with compiled() as found:
                grouped_softmax_attention(*rows, size, **others).sum().backward()
            for kernel in found:
                about = {"kernel": kernel.name[1:], "block": size, "dim": dim}
                yield about | {"gate": gated, "packed": packed} | kernel.resources


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--kernels", ["inference", "training"], choices=("inference", "training"))
    add(arguments, "--blocks", [63, 50], "block sizes of training")
    add(arguments, "--dims", [64, 128], "head dimensions of training")
    options = arguments.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in options.kernels:
        made = inference() if kind == "inference" else training(options.blocks, options.dims)
        found[kind] = rows = list(made)
        print(table(list(rows[0]), [list(row.values()) for row in rows]) + "\n")
    write(options, found)


if __name__ == "__main__":
    main()
