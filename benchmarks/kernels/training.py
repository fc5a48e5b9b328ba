"""How near are the kernels of training to what a GPU could do, and to torch's?

Forward and backward of landmark attention (memstore/kernels/triton_grouped_softmax.py), against
causal attention at the same shapes, bfloat16, 128 dimensions: torch's scaled_dot_product_attention
by its flash kernels and by cuDNN's, FlexAttention as torch.compile makes it, and the package
flash-attn where it is installed. The floor of a kernel is the longer of its multiplications and of
its reading and writing, at rates measured in the same run. Medians, by CUDA events.

--compile-only needs Triton and no GPU: it says what every kernel compiles to.

    python -m benchmarks.kernels.training
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.device_timing import Device
from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_text


class Gates(TypedDict, total=False):
    """What attention takes besides q, k and v; see `memstore.kernels.api`."""

    k_cmt: Tensor
    controlled: Tensor
    cu_seqlens: Tensor


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

    def tensors(
        self, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Gates]:
        """q, k and v [1, H, T, D], and what else attention takes."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, dtype=dtype)

        q, k, v = (
            normal(1, self.length, heads, self.dim).transpose(1, 2)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        q *= self.dim**-0.5
        options: Gates = {}
        if self.gated:
            controlled = (
                torch.rand(1, self.length // (self.block_size + 1), device=self.device) < 0.5
            )
            options = {"k_cmt": normal(self.kv_heads, self.dim), "controlled": controlled}
        if self.packed:
            options["cu_seqlens"] = torch.tensor(
                [0, self.length], dtype=torch.int32, device=self.device
            )
        return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), options


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    heads: int = 16
    dim: int = 128
    blocks: tuple[int, ...] = (63, 50)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def baselines(length: int, device: torch.device) -> dict[str, Attend | str]:
    """Causal attention by others, of rows that are scaled already; or why one is not here."""
    on_cuda = device.type == "cuda"

    def by_torch(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

        return attend

    found: dict[str, Attend | str] = {
        "torch, flash": by_torch(SDPBackend.FLASH_ATTENTION),
        "torch, cuDNN": by_torch(SDPBackend.CUDNN_ATTENTION) if on_cuda else "is of CUDA only",
        "flash-attn": "is not installed" if on_cuda else "is of CUDA only",
    }
    if on_cuda and find_spec("flash_attn") is not None:

        def by_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            from flash_attn import flash_attn_func

            rows = (x.transpose(1, 2) for x in (q, k, v))
            output: Tensor = flash_attn_func(*rows, softmax_scale=1.0, causal=True)
            return output.transpose(1, 2)

        found["flash-attn"] = by_package

    @cache
    def flex() -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(
            lambda b, h, row, key: row >= key, None, None, length, length, device=str(device)
        )
        # not compiled it writes every score, and is no measure of what it can do
        attend = torch.compile(flex_attention, dynamic=False) if on_cuda else flex_attention
        return partial(attend, block_mask=mask, scale=1.0)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex()(*((q, k, v) if on_cuda else (x.detach() for x in (q, k, v))))

    found["FlexAttention" if on_cuda else "FlexAttention, not compiled"] = by_flex
    return found


def grouped_softmax(
    device: Device, length: int, sizes: Sizes = Sizes()
) -> Iterator[dict[str, Any]]:
    """Forward and backward at one length: ours by block size, then everybody else's."""
    from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention

    windows = Windows(0, length, sizes.dim, sizes.heads, sizes.heads, str(device.place))
    (q, k, v), _ = windows.tensors(torch.bfloat16 if device.cuda else torch.float32)
    do = torch.randn_like(q)
    product = (
        2 * sizes.heads * length**2 / 2 * sizes.dim
    )  # of a causal product of rows with columns
    array = q.nbytes
    calls: dict[str, Attend | str] = {
        f"ours, {size} + 1": partial(grouped_softmax_attention, block_size=size)
        for size in sizes.blocks
    }
    for name, attend in (calls | baselines(length, device.place)).items():
        row = {"what": tokens_text(length), "by": name}
        if isinstance(attend, str):
            yield row | {"kernel": "forward", "note": attend}
            continue
        try:
            output = attend(q, k, v)
            taken = device.seconds(partial(attend, q, k, v))
            yield _timed(row | {"kernel": "forward"}, device, taken, 2 * product, 4 * array)
            if not output.requires_grad:
                yield row | {"kernel": "backward", "note": "is of CUDA only"}
                continue
            backward = partial(torch.autograd.grad, output, (q, k, v), do, retain_graph=True)
            taken = device.seconds(backward)
            # scores, dO.V, and a gradient each; some, as ours, make two of these products twice
            yield _timed(row | {"kernel": "backward"}, device, taken, 5 * product, 8 * array)
        except Exception as error:  # another's that does not run here does not stop ours
            if name.startswith("ours"):
                raise
            yield row | {"kernel": "forward", "note": str(error).strip().partition("\n")[0][:100]}


def _timed(
    row: dict[str, Any], device: Device, seconds: float, operations: float, size: float
) -> dict[str, Any]:
    return row | {
        "seconds": seconds,
        "operations": operations,
        "bytes": size,
        "floor": device.floor(size, operations),
        "tflops": operations / seconds / 1e12,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    device, sizes, results = Device(options.repeats), Sizes(options.heads), []
    for length in options.lengths:
        for row in grouped_softmax(device, length * 1024, sizes):
            results.append(
                {name: row.get(name, "") for name in ("kernel", "what", "by", "seconds", "floor")}
                | {"floor/taken": row["floor"] / row["seconds"] if "seconds" in row else ""}
                | {name: row.get(name, "") for name in ("tflops", "note")}
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
