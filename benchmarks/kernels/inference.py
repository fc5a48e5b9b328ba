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

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.options import plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table
from memstore.kernels.reference_landmark_topk import landmark_topk as reference_landmark_topk
from memstore.kernels.reference_memory_attention import (
    memory_attention as reference_memory_attention,
)
from memstore.kernels.slab_copy import load_units
from memstore.kernels.types import LocalAttention

PARTS = ("search", "attention", "gather")
KV_HEADS, HEADS, DIM, BLOCK = 8, 32, 128, 63


class Device:
    """Timing on the CUDA device, and what it can do at most."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
        large = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
        self.stream = large.nbytes / self.seconds(lambda: large.sum())
        square = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
        self.products = 2 * 8192**3 / self.seconds(lambda: square @ square)
        pinned = torch.empty(1 << 28, dtype=torch.int8, pin_memory=True)
        self.load = pinned.nbytes / self.seconds(
            lambda: self._flush.copy_(pinned, non_blocking=True)
        )

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median seconds of work on the device. The flush keeps it busy while Python launches what
        is timed.
        """
        times = []
        for repeat in range(self.repeats + 3):
            self._flush.zero_()
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            if repeat >= 3:
                times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)

    def floor(self, size: float, operations: float = 0) -> float:
        """Seconds that so many bytes and half-precision operations take at least."""
        return max(size / self.stream, operations / self.products)


def search_part(device: Device) -> Iterator[dict[str, Any]]:
    from memstore.kernels.triton_landmark_topk import landmark_topk

    for n in (1 << 16, 1 << 20):
        for dtype in (torch.float16, torch.float32):
            keys = torch.randn(KV_HEADS, n, DIM, device="cuda").to(dtype)
            streamed = device.seconds(lambda keys=keys: keys.view(torch.float32).sum())
            for rows, k in ((1, 4), (1, 64), (256, 4)):
                q = (torch.randn(HEADS, rows, DIM, device="cuda") * DIM**-0.5).to(dtype)
                operations = 2.0 * HEADS * rows * n * DIM
                taken = device.seconds(
                    lambda q=q, k=k, keys=keys, n=n: landmark_topk(q, keys, [(0, n)], k)
                )
                row = {
                    "what": f"{n >> 10}K keys {str(dtype)[6:]}, {rows} tokens, best {k}",
                    "bytes": keys.nbytes,
                    "operations": operations,
                    "floor": device.floor(keys.nbytes, operations),
                    "seconds": taken,
                    "streamed once": streamed,
                }
                if HEADS * rows * n * 4 < 8 << 30:  # the reference writes every score
                    row["torch"] = device.seconds(
                        lambda q=q, k=k, keys=keys, n=n: reference_landmark_topk(
                            q, keys, [(0, n)], k
                        )
                    )
                yield row


def attention_part(device: Device) -> Iterator[dict[str, Any]]:
    from memstore.kernels.triton_memory_attention import memory_attention

    slots, k = 16384, 4
    slab = [torch.randn(slots, BLOCK, DIM, device="cuda").half() for _ in range(2)]
    lengths = torch.full((slots,), BLOCK, device="cuda")
    for rows, alike in ((1, False), (256, False), (256, True)):
        q = torch.randn(1, 1, HEADS, rows, DIM, device="cuda").half() * DIM**-0.5
        chosen = torch.randint(0, slots, (1, HEADS, 1 if alike else rows, k), device="cuda")
        marks = torch.randn(1, HEADS, rows, k, device="cuda")
        gate, lse = (torch.rand(1, HEADS, rows, device="cuda") for _ in range(2))
        local = LocalAttention(torch.randn_like(q[0]), gate, lse)
        size = min(chosen.numel(), slots) * 2 * BLOCK * DIM * 2 + 4 * q.nbytes

        def work(
            attend: Any,
            q: Tensor = q,
            chosen: Tensor = chosen,
            marks: Tensor = marks,
            local: LocalAttention = local,
        ) -> None:
            turns = torch.zeros_like(chosen)
            attend(q, *slab, lengths, chosen, turns, marks, local, gated=True)

        yield {
            "what": f"{rows} tokens x {HEADS} heads x {k} blocks{' alike' if alike else ''}",
            "bytes": size,
            "operations": 4.0 * HEADS * rows * k * BLOCK * DIM,
            "floor": device.floor(size, 4.0 * HEADS * rows * k * BLOCK * DIM),
            "seconds": device.seconds(lambda work=work: work(memory_attention)),
            "torch": device.seconds(lambda work=work: work(reference_memory_attention)),
        }


def gather_part(device: Device) -> Iterator[dict[str, Any]]:
    for size, dim in ((52, 128), (63, 128)):  # K and V of a unit in float16: 26 KB and 32 KB
        host = torch.zeros(4096, 2, size, dim, dtype=torch.float16, pin_memory=True)
        slab = torch.zeros(4096, 2, size, dim, dtype=torch.float16, device="cuda")
        count, unit = 64, host[0].nbytes
        for name, places in (
            ("scattered", list(range(0, 4096, 64))),
            ("in a row", list(range(100, 164))),
        ):

            def one_by_one(into: Tensor, source: Tensor, places: list[int] = places) -> None:
                for slot in places:
                    into[slot].copy_(source[slot], non_blocking=True)

            yield {
                "what": f"{count} units of {unit / 1000:.0f} KB {name}",
                "bytes": count * unit,
                "operations": 0.0,
                "floor": count * unit / device.load,
                "seconds": device.seconds(
                    lambda host=host, slab=slab, places=places: (
                        torch.cuda.current_stream().wait_event(
                            load_units(host, slab, places, places).event
                        )
                    )
                ),
                "one by one": device.seconds(
                    lambda host=host, slab=slab, one=one_by_one: one(slab, host)
                ),
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
        name for name in rows[0] if name not in ("what", "bytes", "operations", "floor", "seconds")
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
