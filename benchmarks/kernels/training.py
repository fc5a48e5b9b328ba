"""How near are the kernels of training to what a GPU could do, and to torch's?

Forward and backward of landmark attention (memstore/kernels/triton_grouped_softmax.py), against
torch's scaled_dot_product_attention (its flash kernels) at the same shapes: causal, bfloat16, 128
dimensions. The floor of a kernel is the longer of its multiplications at the speed of the tensor
cores and its reading and writing at the speed of the memory (both of an H200). Medians of
interleaved repeats, by CUDA events.

--compile-only needs Triton and no GPU: it says what every kernel compiles to.

    python -m benchmarks.kernels.training
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table

# an H200: bfloat16 a second by its tensor cores; bytes a second of its memory
FLOPS, BYTES = 989e12, 4.8e12


@dataclass(frozen=True)
class Work:
    """One thing to measure: two calls, "ours" and "torch"; what ours has to multiply and to move at
    least.
    """

    kernel: str
    shape: str
    calls: dict[str, Callable[[], object]]
    flops: float
    bytes: float

    @property
    def floor(self) -> float:
        """Milliseconds."""
        return 1e3 * max(self.flops / FLOPS, self.bytes / BYTES)


@dataclass(frozen=True)
class Windows:
    """Inputs of grouped softmax on whole windows."""

    block_size: int
    length: int
    dim: int
    heads: int
    kv_heads: int
    device: str
    gated: bool = False
    packed: bool = False

    def tensors(self) -> tuple[list[Tensor], dict[str, object]]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

        rows = [
            normal(1, self.length, heads, self.dim).transpose(1, 2)
            for heads in (self.heads, *[self.kv_heads] * 2)
        ]
        rows[0] *= self.dim**-0.5
        options: dict[str, object] = {}
        if self.gated:
            controlled = (
                torch.rand(1, self.length // (self.block_size + 1), device=self.device) < 0.5
            )
            options = {"k_cmt": normal(self.kv_heads, self.dim), "controlled": controlled}
        if self.packed:
            options["cu_seqlens"] = torch.tensor(
                [0, self.length], dtype=torch.int32, device=self.device
            )
        return [x.requires_grad_() for x in rows], options


def grouped_softmax(lengths: Sequence[int], heads: int) -> list[Work]:
    """Forward and backward by block size and length."""
    from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention

    found = []
    for size in (63, 50):
        for length in lengths:
            (q, k, v), _ = Windows(size, length, 128, heads, heads, "cuda").tensors()
            do = torch.randn_like(q)

            def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, size: int = size) -> Tensor:
                return grouped_softmax_attention(q, k, v, size)

            def torchs(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

            def backward(
                output: Tensor, of: Sequence[Tensor] = (q, k, v), do: Tensor = do
            ) -> Callable[[], object]:
                return lambda: torch.autograd.grad(output, of, do, retain_graph=True)

            product = 2 * heads * length**2 / 2 * 128  # of a causal product of rows with columns
            array = q.numel() * q.element_size()
            shape = f"{size} + 1, {length // 1024}K"
            found += [
                Work("forward", shape, {"ours": ours, "torch": torchs}, 2 * product, 4 * array),
                # scores and dO.V are made twice, by rows and by keys
                Work(
                    "backward",
                    shape,
                    {"ours": backward(ours()), "torch": backward(torchs())},
                    7 * product,
                    10 * array,
                ),
            ]
    return found


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians, the calls taken in turns, after three rounds that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                taken[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    results = []
    for work in grouped_softmax([n * 1024 for n in options.lengths], options.heads):
        times = milliseconds(work.calls, options.repeats)
        results.append(
            {
                "kernel": work.kernel,
                "shape": work.shape,
                **times,
                "floor": work.floor,
                "floor/ours": work.floor / times["ours"],
                "torch/ours": times["torch"] / times["ours"],
                "tflops": work.flops / times["ours"] / 1e9,
            }
        )
    return results


def compiled_to(blocks: Sequence[int], dims: Sequence[int]) -> list[dict[str, object]]:
    """What ptxas says of every kernel, for sm_90."""
    from benchmarks.kernels.ahead_of_time import compiled
    from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention

    results = []
    for size in blocks:
        for dim in dims:
            for gated, packed in ((False, False), (True, False), (True, True)):
                rows, others = Windows(size, 1024, dim, 2, 1, "cpu", gated, packed).tensors()
                with compiled() as found:
                    grouped_softmax_attention(*rows, size, **others).sum().backward()
                for kernel in found:
                    results.append(
                        {
                            "kernel": kernel.name[1:],
                            "block": size,
                            "dim": dim,
                            "gate": gated,
                            "packed": packed,
                        }
                        | kernel.resources
                    )
    return results


def main() -> None:
    arguments = plain_parser(__doc__)
    arguments.add_argument("--compile-only", action="store_true", help="needs no GPU")
    add(arguments, "--blocks", [63, 50], "block sizes to compile for")
    add(arguments, "--dims", [64, 128], "head dimensions to compile for")
    add(arguments, "--lengths", [4, 8, 16, 32], "thousands of tokens")
    add(arguments, "--heads", 16)
    add(arguments, "--repeats", 20)
    options = arguments.parse_args()
    if not options.compile_only and not torch.cuda.is_available():
        sys.exit("error: no CUDA device to measure on; --compile-only works without one")
    rows = compiled_to(options.blocks, options.dims) if options.compile_only else measure(options)
    cells = [[f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    print(table(list(rows[0]), cells))
    device = "none" if options.compile_only else torch.cuda.get_device_name()
    write(options, {"device": device, "results": rows})


if __name__ == "__main__":
    main()
