"""How near are the kernels of inference to what a device's memory and bus admit?

search     The best 4 (and 64) of 64K and 1M landmark keys of 8 KV heads, 128 channels, for one
           token of 32 query heads and for a chunk of 256: against streaming the keys once (a sum
           over them, timed the same way), and against the reference in torch.
attention  One decoding step (32 heads reading 4 blocks each from a slab) and a chunk of 256 tokens,
           whose rows choose each for themselves or all alike.
gather     64 units of 26 KB and of 32 KB, scattered and in a row, from page-locked memory: a
           copy a run of slots, a copy a unit; against one copy of as many bytes.

Every time is the median over repeats between CUDA events, with the second-level cache flushed
before. The floor is the bytes that must move at the rate of the streaming sum (search, attention)
or of one large copy (gather), or the operations at the measured rate of float16 matrix products,
whichever takes longer; both are printed.

--compile-only needs no device: it compiles every kernel for one and prints registers, shared memory
and spilled bytes as its assembler reports them.

    python -m benchmarks.kernels.inference
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.device_timing import Device
from benchmarks.common.options import plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_text
from memstore.kernels.reference_landmark_topk import landmark_topk as reference_landmark_topk
from memstore.kernels.reference_memory_attention import (
    memory_attention as reference_memory_attention,
)
from memstore.kernels.slab_copy import load_units
from memstore.kernels.types import LocalAttention

PARTS = ("search", "attention", "gather")
KV_HEADS, HEADS, BLOCK = 8, 32, 63  # of what is compiled


@dataclass(frozen=True)
class Sizes:
    """What is measured: heads and blocks, keys of a search, tokens of a chunk, slots of a slab."""

    kv_heads: int = 8
    heads: int = 32
    dim: int = 128
    block: int = 63
    keys: tuple[int, ...] = (1 << 16, 1 << 20)
    chunk: int = 256
    best: tuple[int, int] = (4, 64)
    slots: int = 16384
    units: int = 64  # gathered from 64 times as many


TINY = Sizes(1, 2, 16, 7, (70,), 3, (2, 4), 32, 4)  # for Triton's interpreter


def search_part(device: Device, sizes: Sizes = Sizes()) -> Iterator[dict[str, Any]]:
    from memstore.kernels.triton_landmark_topk import landmark_topk

    for n in sizes.keys:
        for dtype in (torch.float16, torch.float32):
            yield from searches(device, sizes, n, dtype, landmark_topk)


def searches(
    device: Device, sizes: Sizes, n: int, dtype: torch.dtype, landmark_topk: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    """The searches over one set of keys."""
    dim, heads, few, many = sizes.dim, sizes.heads, *sizes.best
    keys = torch.randn(sizes.kv_heads, n, dim, device=device.place).to(dtype)
    streamed = device.seconds(lambda: keys.view(torch.float32).sum())
    for rows, k in ((1, few), (1, many), (sizes.chunk, few)):
        q = (torch.randn(heads, rows, dim, device=device.place) * dim**-0.5).to(dtype)

        def search(by: Callable[..., Any], q: Tensor = q, k: int = k) -> None:
            by(q, keys, [(0, n)], k)

        operations = 2.0 * heads * rows * n * dim
        row = {
            "what": f"{tokens_text(n)} keys {str(dtype)[6:]}, {rows} tokens, best {k}",
            "bytes": keys.nbytes,
            "operations": operations,
            "floor": device.floor(keys.nbytes, operations),
            "seconds": device.seconds(partial(search, landmark_topk)),
            "called": device.called(partial(search, landmark_topk), 20 if device.cuda else 1),
            "streamed once": streamed,
        }
        if heads * rows * n * 4 < 8 << 30:  # the reference writes every score
            row["torch"] = device.seconds(partial(search, reference_landmark_topk))
        yield row


def attention_part(device: Device, sizes: Sizes = Sizes()) -> Iterator[dict[str, Any]]:
    from memstore.kernels.triton_memory_attention import memory_attention

    slots, heads, dim, k = sizes.slots, sizes.heads, sizes.dim, sizes.best[0]
    here: Any = {"device": device.place}
    slab = [torch.randn(slots, sizes.block, dim, **here).half() for _ in range(2)]
    lengths = torch.full((slots,), sizes.block, **here)
    for rows, alike in ((1, False), (sizes.chunk, False), (sizes.chunk, True)):
        q = torch.randn(1, 1, heads, rows, dim, **here).half() * dim**-0.5
        chosen = torch.randint(0, slots, (1, heads, 1 if alike else rows, k), **here)
        turns = torch.zeros_like(chosen)
        marks = torch.randn(1, heads, rows, k, **here)
        gate, lse = (torch.rand(1, heads, rows, **here) for _ in range(2))
        local = LocalAttention(torch.randn_like(q[0]), gate, lse)
        size = min(chosen.numel(), slots) * 2 * sizes.block * dim * 2 + 4 * q.nbytes
        operations = 4.0 * heads * rows * k * sizes.block * dim
        given = (q, *slab, lengths, chosen, turns, marks, local)
        ours = partial(memory_attention, *given, gated=True)
        yield {
            "what": f"{rows} tokens x {heads} heads x {k} blocks{' alike' if alike else ''}",
            "bytes": size,
            "operations": operations,
            "floor": device.floor(size, operations),
            "seconds": device.seconds(ours),
            "called": device.called(ours, 50 if device.cuda else 1),
            "torch": device.seconds(partial(reference_memory_attention, *given, gated=True)),
        }


def gather_part(device: Device, sizes: Sizes = Sizes()) -> Iterator[dict[str, Any]]:
    count, room = sizes.units, 64 * sizes.units
    for size in (52, 63):  # K and V of a unit in float16: 26 KB and 32 KB
        shape = (room, 2, size, sizes.dim)
        host = device.host(*shape, dtype=torch.float16).normal_()
        slab = torch.zeros(shape, dtype=torch.float16, device=device.place)
        unit = host[0].nbytes
        for name, places in (
            ("scattered", list(range(0, room, 64))),
            ("in a row", list(range(count, 2 * count))),
        ):

            def one_by_one(
                host: Tensor = host, slab: Tensor = slab, places: list[int] = places
            ) -> None:
                for slot in places:
                    slab[slot].copy_(host[slot], non_blocking=True)

            def in_runs(
                host: Tensor = host, slab: Tensor = slab, places: list[int] = places
            ) -> None:
                event = load_units(host, slab, places, places).event
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)

            yield {
                "what": f"{count} units of {unit / 1000:.0f} KB {name}",
                "bytes": count * unit,
                "operations": 0.0,
                "floor": device.floor(count * unit, up=True),
                "seconds": device.seconds(in_runs),
                "one by one": device.seconds(one_by_one),
            }


def compile_all() -> Iterator[dict[str, Any]]:
    """Every kernel at the sizes that matter, compiled by launches that do not run."""
    from benchmarks.kernels.ahead_of_time import compiled
    from memstore.kernels.triton_landmark_topk import landmark_topk
    from memstore.kernels.triton_memory_attention import memory_attention

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


def main() -> None:
    arguments = plain_parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--repeats", type=int, default=30)
    arguments.add_argument("--compile-only", action="store_true", help="needs no device")
    options = arguments.parse_args()
    if options.compile_only:
        rows = list(compile_all())
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        write(options, {"compiled": rows})
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here to measure; --compile-only needs none")
    device = Device(options.repeats)
    results: dict[str, Any] = {
        "device": {
            "name": torch.cuda.get_device_name(),
            "bytes a second": device.stream,
            "float16 operations a second": device.products,
            "up": device.load,
        }
    }
    print(
        f"{torch.cuda.get_device_name()}: {device.stream / 1e9:,.0f} GB/s streamed, "
        f"{device.products / 1e12:,.0f} TFLOP/s in float16, {device.load / 1e9:.1f} GB/s up\n"
    )
    runs = {"search": search_part, "attention": attention_part, "gather": gather_part}
    for part in options.parts:
        results[part] = list(runs[part](device))
        print(report(results[part]) + "\n", flush=True)
    write(options, results)


def report(rows: list[dict[str, Any]]) -> str:
    """Times in microseconds beside the floor that bytes and operations set."""
    times = [
        name
        for name in rows[0]
        if name not in ("what", "bytes", "operations", "floor", "seconds", "called")
    ]
    head = [
        "what",
        "MB",
        "GFLOP",
        "floor, µs",
        "taken, µs",
        "floor / taken",
        *(f"{name}, µs" for name in times),
    ]
    lines = []
    for row in rows:
        size, operations = f"{row['bytes'] / 1e6:,.1f}", f"{row['operations'] / 1e9:,.2f}"
        floor, taken = f"{row['floor'] * 1e6:,.1f}", f"{row['seconds'] * 1e6:,.1f}"
        others = [f"{row[name] * 1e6:,.1f}" if name in row else "" for name in times]
        lines.append(
            [
                row["what"],
                size,
                operations,
                floor,
                taken,
                f"{row['floor'] / row['seconds']:.2f}",
                *others,
            ]
        )
    return table(head, lines)


if __name__ == "__main__":
    main()
