"""The Triton kernels of inference on a CUDA device, against what the device's memory and bus admit.

search     the best 4 (and 64) of 64K and 1M landmark keys of 8 KV heads, 128 channels, for one
token of 32 query heads
           and for a chunk of 256: against streaming the keys once (a sum over them, timed the same
           way), and against the reference in torch.
attention  one decoding step (32 heads reading 4 blocks each from a slab) and a chunk of 256 tokens,
whose rows choose
           each for themselves or all alike; from numbers and from int8 and int4 codes.
gather     64 units of 26 KB and of 32 KB, scattered and in a row, from page-locked memory and back:
one kernel, a copy
           a run of slots, a copy a unit; against one copy of as many bytes.

Every time is the median over repeats between CUDA events, with the second-level cache flushed
before. The floor is the bytes that must move at the rate of the streaming sum (search, attention)
or of one large copy (gather), or the operations at the measured rate of float16 matrix products,
whichever takes longer; both are printed.

--compile-only needs no device: it compiles every kernel for one (sm_90 unless --arch says
otherwise) and prints registers, shared memory and spilled bytes as its assembler reports them.

    python -m benchmarks.kernels.inference
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.results import machine
from benchmarks.common.tables import table
from memstore.kernels import gather, reference
from memstore.kernels.quantised import UnitScales
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
        self.save = pinned.nbytes / self.seconds(
            lambda: pinned.copy_(self._flush, non_blocking=True)
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
    from memstore.kernels.landmark_topk import landmark_topk

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
                        lambda q=q, k=k, keys=keys, n=n: reference.landmark_topk(
                            q, keys, [(0, n)], k
                        )
                    )
                yield row


def attention_part(device: Device) -> Iterator[dict[str, Any]]:
    from memstore.kernels.memory_attention import memory_attention

    slots, k = 16384, 4
    slab = [torch.randn(slots, BLOCK, DIM, device="cuda").half() for _ in range(2)]
    codes = [
        torch.randint(-127, 128, slab[0].shape, device="cuda", dtype=torch.int8) for _ in range(2)
    ]
    steps = [torch.rand(slots, -(-BLOCK // 32), DIM, device="cuda").half() * 0.02 for _ in range(2)]
    steps += [torch.rand(slots, BLOCK, DIM // 32, device="cuda").half() * 0.02 for _ in range(2)]
    lengths = torch.full((slots,), BLOCK, device="cuda")
    for rows, alike in ((1, False), (256, False), (256, True)):
        q = torch.randn(1, 1, HEADS, rows, DIM, device="cuda").half() * DIM**-0.5
        chosen = torch.randint(0, slots, (1, HEADS, 1 if alike else rows, k), device="cuda")
        marks = torch.randn(1, HEADS, rows, k, device="cuda")
        gate, lse = (torch.rand(1, HEADS, rows, device="cuda") for _ in range(2))
        local = LocalAttention(torch.randn_like(q[0]), gate, lse)
        for bits in (0, 8, 4):
            keys, values = (
                slab if bits == 0 else (codes if bits == 8 else (codes[0].view(torch.uint8),) * 2)
            )
            scales = None if bits == 0 else UnitScales(*steps, bits)
            unit = 2 * BLOCK * DIM * (bits or 16) // 8
            unit += 0 if bits == 0 else sum(x[0].nbytes for x in steps)
            size = min(chosen.numel(), slots) * unit + 4 * q.nbytes

            def work(
                attend: Any,
                q: Tensor = q,
                keys: Tensor = keys,
                values: Tensor = values,
                chosen: Tensor = chosen,
                marks: Tensor = marks,
                local: LocalAttention = local,
                scales: UnitScales | None = scales,
            ) -> None:
                attend(
                    q,
                    keys,
                    values,
                    lengths,
                    chosen,
                    torch.zeros_like(chosen),
                    marks,
                    local,
                    gated=True,
                    scales=scales,
                )

            yield {
                "what": f"{rows} tokens x {HEADS} heads x {k} blocks"
                f"{' alike' if alike else ''}, {bits or 16} bits",
                "bytes": size,
                "operations": 4.0 * HEADS * rows * k * BLOCK * DIM,
                "floor": device.floor(size, 4.0 * HEADS * rows * k * BLOCK * DIM),
                "seconds": device.seconds(lambda work=work: work(memory_attention)),
                "torch": device.seconds(lambda work=work: work(reference.memory_attention)),
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

            for direction, move, source, target, peak in (
                ("up", gather.load_units, host, slab, device.load),
                ("down", gather.save_units, slab, host, device.save),
            ):
                row: dict[str, Any] = {
                    "what": f"{count} units of {unit / 1000:.0f} KB {name}, {direction}",
                    "bytes": count * unit,
                    "operations": 0.0,
                    "floor": count * unit / peak,
                }
                for way in ("kernel", "copies"):
                    row[way] = device.seconds(
                        lambda way=way, move=move, source=source, target=target, places=places: (
                            move(source, target, places, places, by=way).order()
                        )
                    )
                row["one by one"] = device.seconds(
                    lambda source=source, target=target, one=one_by_one: one(target, source)
                )
                row["seconds"] = min(row["kernel"], row["copies"])
                yield row


# Without a device


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], multiples: str, arch: int
) -> dict[str, Any]:
    """Compile for an architecture; registers a thread, shared and spilled bytes. multiples: of 16,
    these arguments.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    warps = constants.pop("num_warps", 4)
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = [
        name for name in signature if signature[name].startswith("*") or name in multiples.split()
    ]
    source = ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "kernel.ptx"
        text.write_text(made.asm["ptx"])
        target = re.search(r"\.target (\w+)", made.asm["ptx"])
        assert target is not None
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        said = subprocess.run(
            [assembler, "-v", f"-arch={target[1]}", text, "-o", Path(directory) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers, spilled = (
        re.search(r"Used (\d+) registers", said),
        re.search(r"(\d+) bytes spill stores", said),
    )
    assert registers is not None and spilled is not None
    return {
        "warps": warps,
        "registers": int(registers[1]),
        "shared bytes": made.metadata.shared,
        "spilled bytes": int(spilled[1]),
    }


def compile_all(arch: int) -> Iterator[dict[str, Any]]:
    """Every kernel at the sizes that matter."""
    from memstore.kernels import landmark_topk, memory_attention, slab_copy

    names = {"fp16": torch.float16, "fp32": torch.float32}
    for dim in (64, 128):
        for alike, dtype, k, bits in (
            (False, "fp16", 4, 0),
            (False, "fp32", 4, 0),
            (False, "fp16", 4, 8),
            (False, "fp16", 4, 4),
            (True, "fp16", 4, 0),
            (True, "fp16", 64, 0),
            (True, "fp16", 4, 8),
            (True, "fp16", 4, 4),
        ):
            code = {0: "*fp16", 8: "*i8", 4: "*u8"}[bits]
            types = dict.fromkeys(("q", "scores", "local", "out"), f"*{dtype}")
            types |= dict.fromkeys(("gates", "lses", "mass"), "*fp32") | {"k": code, "v": code}
            types |= dict.fromkeys(("lengths", "slots", "rotations"), "*i64")
            types |= dict.fromkeys(
                ("k_steps", "k_zeros", "v_steps", "v_zeros"), "*fp16" if bits else code
            )
            sizes = memory_attention.tile_sizes(
                256 if alike else 1, k, BLOCK, dim, alike=alike, bits=bits
            )
            constants = {
                "GATED": True,
                "MASS": False,
                "BITS": bits,
                "s_k": 1,
                "r_k": 1,
                "m_k": 1,
                **sizes,
            }
            kernel = memory_attention._shared_kernel if alike else memory_attention._rows_kernel
            rows = "rows alike" if alike else "row by row"
            yield {
                "kernel": f"attention, {rows}, {dtype}, {k} blocks, {bits or 16} bits",
                "head dim": dim,
                **compiled(kernel, types, constants, "D q_r q_b q_h q_t k_apart v_apart", arch),
            }
        for dtype, rows, k in (
            ("fp16", 1, 4),
            ("fp16", 4, 4),
            ("fp16", 4, 64),
            ("fp16", 16, 4),
            ("fp16", 1024, 4),
            ("fp16", 1024, 64),
            ("fp32", 4, 4),
            ("fp32", 1024, 4),
            ("fp32", 1024, 64),
        ):
            types = dict.fromkeys(("q", "keys"), f"*{dtype}") | dict.fromkeys(
                ("firsts", "heads"), "*i32"
            )
            types |= {"bias": "*fp32", "table": "*i64", "best_out": "*i64", "lse_out": "*fp32"}
            constants = {"LSE": True, "BIAS": True, "GROUP": 1 if rows == 1 else 4}
            constants |= landmark_topk.tile_sizes(rows, k, dim, names[dtype])
            yield {
                "kernel": f"search, {rows} rows, best {k}, {dtype}",
                "head dim": dim,
                **compiled(
                    landmark_topk._partial_kernel, types, constants, "D q_h q_t k_h k_n share", arch
                ),
            }
    types = {"best_in": "*i64", "lse_in": "*fp32", "table": "*i64", "wanted": "*i32"}
    types |= {"scores": "*fp32", "found": "*i64", "lse": "*fp32"}
    for k, parts in ((4, 128), (64, 64)):
        constants = {"LSE": True, "TOP": k, "PARTS": parts}
        yield {
            "kernel": f"search, joining {parts} shares of {k}",
            "head dim": "any",
            **compiled(landmark_topk._merge_kernel, types, constants, "", arch),
        }
    types = {"parts": "*fp32", "out": "*fp16"}
    yield {
        "kernel": "attention, adding up parts",
        "head dim": "any",
        **compiled(memory_attention._sum_kernel, types, {"BLOCK": 1024}, "size", arch),
    }
    types = dict.fromkeys(("slab_in", "slab_out"), "*i32") | dict.fromkeys(
        ("sources", "targets"), "*i64"
    )
    yield {
        "kernel": "copying units",
        "head dim": "any",
        **compiled(slab_copy._copy_kernel, types, {"BLOCK": slab_copy._BLOCK}, "words", arch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile for --arch, print what each kernel takes",
    )
    parser.add_argument("--arch", type=int, default=90, help="80 for sm_80, 90 for sm_90")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    options = parser.parse_args()
    try:
        import triton
    except ImportError:
        raise SystemExit("Triton is not installed; pip install triton") from None
    results: dict[str, Any] = {"triton": triton.__version__}
    if options.compile_only:
        results["compiled"] = list(compile_all(options.arch))
        print(
            table(list(results["compiled"][0]), [list(row.values()) for row in results["compiled"]])
        )
    elif not torch.cuda.is_available():
        raise SystemExit(
            "this measures a CUDA device and there is none here; --compile-only needs none"
        )
    else:
        device = Device(options.repeats)
        results["device"] = {
            "name": torch.cuda.get_device_name(),
            "bytes a second": device.stream,
            "float16 operations a second": device.products,
            "up": device.load,
            "down": device.save,
        }
        print(
            f"{torch.cuda.get_device_name()}: {device.stream / 1e9:,.0f} GB/s streamed, "
            f"{device.products / 1e12:,.0f} TFLOP/s in float16, {device.load / 1e9:.1f} GB/s up, "
            f"{device.save / 1e9:.1f} GB/s down\n"
        )
        runs = {"search": search_part, "attention": attention_part, "gather": gather_part}
        for part in options.parts:
            results[part] = list(runs[part](device))
            print(report(results[part]) + "\n", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine(), **results}, indent=1))
        print(f"\nwritten: {options.out}")


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
