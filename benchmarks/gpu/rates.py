"""What the device does at most: sums and copies in its memory, matrix products, copies from main
memory, launches. Every other number is held against rates like these.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.part import Case, Row, Setting


def cases(setting: Setting) -> list[Case]:
    return [
        ("memory", lambda: memory(setting)),
        ("products", lambda: products(setting)),
        ("main memory", lambda: main_memory(setting)),
        ("launches", lambda: launches(setting)),
    ]


def memory(setting: Setting) -> Iterator[Row]:
    """A sum reads; a copy reads and writes."""
    numbers = 1 << 12 if setting.tiny else 1 << 30 if setting.cuda else 1 << 24
    here = torch.randn(numbers, device=setting.place)
    there = torch.empty_like(here)
    seconds = setting.meter.seconds
    size = f"{here.nbytes / 1e9:.3g} GB"
    yield Row(f"sum of {size}", "torch", seconds(here.sum), 0, here.nbytes)
    yield Row(f"copy of {size}", "torch", seconds(lambda: there.copy_(here)), 0, 2 * here.nbytes)


def products(setting: Setting) -> Iterator[Row]:
    side = 32 if setting.tiny else 8192 if setting.cuda else 512
    kinds = [(torch.bfloat16, False), (torch.float16, False), (torch.float32, False)]
    if setting.cuda:
        kinds.append((torch.float32, True))
    for dtype, tf32 in kinds:
        a, b = (torch.randn(side, side, device=setting.place).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = tf32
        name = f"{side} x {side} {str(dtype)[6:]}{', tf32' if tf32 else ''}"
        taken = setting.meter.seconds(partial(torch.matmul, a, b))
        yield Row(name, "torch", taken, 2.0 * side**3)
    torch.backends.cuda.matmul.allow_tf32 = False


def main_memory(setting: Setting) -> Iterator[Row]:
    """Copies up and down, of page-locked and of ordinary memory."""
    sizes = (1 << 12,) if setting.tiny else (32 << 10, 1 << 20, 256 << 20)
    for size in sizes:
        device = torch.empty(size, dtype=torch.int8, device=setting.place)
        for kind, host in (
            ("page-locked", setting.meter.host(size, dtype=torch.int8)),
            ("ordinary", torch.ones(size, dtype=torch.int8)),
        ):
            up = setting.meter.seconds(partial(device.copy_, host, non_blocking=True))
            down = setting.meter.seconds(partial(host.copy_, device, non_blocking=True))
            yield Row(f"{size / 1e6:.3g} MB up", kind, up, 0, size, up=True)
            yield Row(f"{size / 1e6:.3g} MB down", kind, down, 0, size, up=True)


def launches(setting: Setting) -> Iterator[Row]:
    """Of kernels that do next to nothing: what a step of many of them takes at least."""
    x, count = torch.zeros(16, device=setting.place), 100

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    called = setting.meter.called(many, 2 if setting.tiny else 10) / count
    yield Row("a launch", "torch, from Python", called)
    if not setting.cuda:
        yield Row("a launch", "in a CUDA graph", note="is of CUDA only")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    yield Row("a launch", "in a CUDA graph", setting.meter.called(graph.replay) / count)
