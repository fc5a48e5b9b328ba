"""The kernels of inference, on data that does not fit the cache: how near they are to what a
device's memory and bus admit.

search     The best 4 (and 64) of 64K and 1M landmark keys of 8 KV heads, 128 channels, for one
           token of 32 query heads and for a chunk of 256: against streaming the keys once (a sum
           over them, timed the same way), and against the reference in torch.
attention  One decoding step (32 heads reading 4 blocks each from a slab) and a chunk of 256 tokens,
           whose rows choose each for themselves or all alike.
gather     8, 64 and 8192 units of 32 KB from page-locked slots, scattered, in runs of 16 and all in
           one (which is one copy): by a copy a run, by the kernel, and as `load_units` chooses.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common.tables import tokens_text
from benchmarks.gpu.part import Case, Row, Setting
from memstore.kernels import reference
from memstore.kernels.reference import LocalAttention
from memstore.kernels.slab_copy import load_units


class Sizes(NamedTuple):
    """What is measured: heads and blocks, keys of a search, tokens of a chunk, slots of a slab."""

    kv_heads: int = 8
    heads: int = 32
    dim: int = 128
    block: int = 63
    keys: tuple[int, ...] = (1 << 16, 1 << 20)
    chunk: int = 256
    best: tuple[int, int] = (4, 64)
    slots: int = 16384
    units: tuple[int, ...] = (8, 64, 8192)  # gathered from twice as many
    run: int = 16


TINY = Sizes(1, 2, 16, 7, (70,), 3, (2, 4), 32, (4, 8), 2)  # for Triton's interpreter


def cases(setting: Setting) -> list[Case]:
    sizes = TINY if setting.tiny else Sizes()
    found: list[Case] = []
    for n in sizes.keys:
        for dtype in (torch.float16, torch.float32):
            name = f"search of {n} keys, {str(dtype)[6:]}"
            found.append((name, partial(search, setting, sizes, n, dtype)))
    found.append(("attention", partial(attention, setting, sizes)))
    return [*found, ("gather", partial(gather, setting, sizes))]


def search(setting: Setting, sizes: Sizes, n: int, dtype: torch.dtype) -> Iterator[Row]:
    """The searches over one set of keys."""
    from memstore.kernels.triton_landmark_topk import landmark_topk

    meter, heads, (few, many) = setting.meter, sizes.heads, sizes.best
    keys = torch.randn(sizes.kv_heads, n, sizes.dim, device=setting.place).to(dtype)
    streamed = meter.seconds(lambda: keys.view(torch.float32).sum())
    for rows, k in ((1, few), (1, many), (sizes.chunk, few)):
        q = (torch.randn(heads, rows, sizes.dim, device=setting.place) * sizes.dim**-0.5).to(dtype)
        given = (q, keys, [(0, n)], k)
        operations = 2.0 * heads * rows * n * sizes.dim
        what = f"{tokens_text(n)} keys {str(dtype)[6:]}, {rows} tokens, best {k}"
        ours = partial(landmark_topk, *given)
        yield timed(setting, what, ours, operations, keys.nbytes)
        if heads * rows * n * 4 < 8 << 30:  # the reference writes every score
            taken = meter.seconds(partial(reference.landmark_topk, *given))
            yield Row(what, "torch", taken, operations, keys.nbytes)
        yield Row(what, "streamed once", streamed, 0, keys.nbytes)


def attention(setting: Setting, sizes: Sizes) -> Iterator[Row]:
    """By rows that choose for themselves and alike."""
    from memstore.kernels.triton_memory_attention import memory_attention

    slots, heads, dim, k = sizes.slots, sizes.heads, sizes.dim, sizes.best[0]
    here: Any = {"device": setting.place}
    slab = [torch.randn(slots, sizes.block, dim, **here).half() for _ in range(2)]
    lengths = torch.full((slots,), sizes.block, **here)
    for rows, alike in ((1, False), (sizes.chunk, False), (sizes.chunk, True)):
        q = torch.randn(1, 1, heads, rows, dim, **here).half() * dim**-0.5
        chosen = torch.randint(0, slots, (1, heads, 1 if alike else rows, k), **here)
        marks = torch.randn(1, heads, rows, k, **here)
        gate, lse = (torch.rand(1, heads, rows, **here) for _ in range(2))
        local = LocalAttention(torch.randn_like(q[0]), gate, lse)
        size = min(chosen.numel(), slots) * 2 * sizes.block * dim * 2 + 4 * q.nbytes
        operations = 4.0 * heads * rows * k * sizes.block * dim
        given = (q, *slab, lengths, chosen, torch.zeros_like(chosen), marks, local)
        what = f"{rows} tokens x {heads} heads x {k} blocks{' alike' if alike else ''}"
        yield timed(setting, what, partial(memory_attention, *given, gated=True), operations, size)
        by_torch = partial(reference.memory_attention, *given, gated=True)
        yield Row(what, "torch", setting.meter.seconds(by_torch), operations, size)


def timed(
    setting: Setting, what: str, ours: Callable[[], object], operations: float, size: int
) -> Row:
    """A row of our kernel: its time on the device, and when called from Python."""
    called = setting.meter.called(ours, 1 if setting.tiny else 50)
    note = f"{called * 1e6:,.0f} µs a call from Python"
    return Row(what, "ours", setting.meter.seconds(ours), operations, size, note=note)


def gather(setting: Setting, sizes: Sizes) -> Iterator[Row]:
    meter, room = setting.meter, 2 * sizes.units[-1]
    host = meter.host(room, 2, sizes.block, sizes.dim, dtype=torch.float16).normal_()
    slab = torch.zeros_like(host, device=setting.place)
    unit = host[0].nbytes

    def loaded(slots: list[int], triton: bool | None) -> None:
        event = load_units(host, slab, slots, slots, triton=triton)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    for count in sizes.units:
        runs = {"scattered": 1, f"in runs of {sizes.run}": sizes.run, "in a row": count}
        for name, run in runs.items():
            if run > count or (run == count and name != "in a row"):
                continue
            slots = [slot for slot in range(2 * count) if slot // run % 2 == 0]
            what = f"{count:,} units of {unit / 1000:.0f} KB {name}"
            for by, triton in (("as chosen", None), ("a copy a run", False), ("the kernel", True)):
                taken = meter.seconds(partial(loaded, slots, triton))
                yield Row(what, by, taken, 0, count * unit, up=True)
