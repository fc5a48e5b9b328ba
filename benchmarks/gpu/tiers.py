"""The device tier over the page-locked tier: what a hit costs, what a miss costs by where the unit
lies, and how much of a copy the device's own work hides.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.storage.records import BATCH, Memory, Shape
from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.kernels.slab_copy import load_units
from memstore.store.open_options import OpenOptions


def cases(setting: Setting) -> list[Case]:
    shape = Shape("tiny", 2, 8, 16) if setting.tiny else Shape("8B", 8, 63, 128)
    return [
        ("hits and misses", partial(leases, setting, shape)),
        ("from disk", partial(from_disk, setting, shape)),
        *(
            (f"overlap, {units} units", partial(overlap, setting, units, side))
            for units, side in (((8, 32), (16, 32)) if setting.tiny else ((64, 2048), (8192, 8192)))
        ),
    ]


def leased(store: MemoryStore, batches: Sequence[Sequence[BlockKey]], setting: Setting) -> float:
    """Median seconds of a lease on a batch, until the units are where they are read."""
    times = []
    for units in batches:
        began = time.perf_counter()
        with store.lease(units):
            setting.meter.wait()
        times.append(time.perf_counter() - began)
    return median(times)


def hits(store: MemoryStore) -> str:
    """Of every tier."""
    counts = store.tier_stats().items()
    return ", ".join(f"{tier} {c['hits']:,} of {c['hits'] + c['misses']:,}" for tier, c in counts)


def leases(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Units of a session's own, which lie in the page-locked tier."""
    blocks = 2 * BATCH if setting.tiny else 4096
    few = 4 * BATCH  # units that the device tier has room for, where most are misses
    count = 5 if setting.tiny else 200
    for name, units_there in (("a hit", blocks * shape.heads), ("a miss", few), ("", None)):
        options: OpenOptions = {"host_budget": 2 * blocks * shape.record}
        if units_there is not None:
            options |= {"device": setting.device, "device_budget": units_there * shape.unit}
        with (
            MemoryStore.in_memory(shape.signature, **options) as store,
            store.retrieval.session_document() as scratch,
        ):
            every = []
            for block in range(blocks):
                k, v = torch.randn(2, 1, shape.heads, shape.rows, shape.dim).half()
                scratch.add(0, k, v, torch.randn(1, shape.heads, shape.dim).half())
                every += [BlockKey(scratch.document, 0, block, head) for head in range(shape.heads)]
            if name == "a hit":  # have them all come up
                for first in range(0, len(every), BATCH):
                    with store.lease(every[first : first + BATCH]):
                        pass
            batches = [random.sample(every, BATCH) for _ in range(count)]
            taken = leased(store, batches, setting)
            what = f"{BATCH} units of {shape.unit / 1000:.3g} KB"
            note = f"{1e6 * taken / BATCH:.2f} µs a unit; {hits(store)}"
            if name == "":
                yield Row(what, "a hit in main memory", taken, note=note)
            elif name == "a hit":
                yield Row(what, "a hit in the device tier", taken, note=note)
            else:
                size = BATCH * shape.unit
                yield Row(what, "a miss there, in main memory", taken, 0, size, up=True, note=note)


def from_disk(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Units in no tier: from a file in the page cache, through main memory, to the device."""
    size = (8 if setting.tiny else 400) * BATCH * shape.record // shape.heads
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        memory = Memory(Path(directory) / "m", shape)
        stack.callback(memory.close)
        memory.write(size)
        budget = 4 * BATCH * shape.unit
        store = stack.enter_context(
            MemoryStore.in_memory(
                shape.signature, host_budget=budget, device=setting.device, device_budget=budget
            )
        )
        store.tiers.host.source = memory.tier  # a memory of records alone, which no store opens
        every = [
            BlockKey(memory.document.id, 0, block, head)
            for block in range(memory.records)
            for head in range(shape.heads)
        ]
        random.shuffle(every)
        batches = [every[at : at + BATCH] for at in range(0, len(every) - BATCH, BATCH)]
        taken = leased(store, batches[: 5 if setting.tiny else 300], setting)
        what = f"{BATCH} units of {shape.unit / 1000:.3g} KB"
        note = f"{1e6 * taken / BATCH:.2f} µs a unit; stored raw, scattered"
        by = "a miss in both, in the page cache"
        yield Row(what, by, taken, 0, BATCH * shape.unit, up=True, note=note)


def overlap(setting: Setting, units: int, side: int) -> Iterator[Row]:
    """Copies up beside matrix products: each alone, both at once."""
    shape = (2 * units, 2, 7, 16) if setting.tiny else (2 * units, 2, 63, 128)
    host = setting.meter.host(*shape, dtype=torch.float16).normal_()
    there = torch.empty_like(host, device=setting.place)
    a, b = (torch.randn(side, side, device=setting.place) for _ in range(2))
    if setting.cuda:
        a, b = a.bfloat16(), b.bfloat16()

    def compute() -> None:
        for _ in range(8):
            torch.mm(a, b)

    def copies(slots: list[int], triton: bool, first: bool, then: bool) -> None:
        """Copies, and products after them or not; or products before them: copies wait for what
        the device was given before.
        """
        if not first:
            compute()
        event = load_units(host, there, slots, slots, triton=triton)
        if then:
            compute()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    # no flush: the copies would wait for it
    seconds = partial(setting.meter.called, calls=1 if setting.tiny else 5 if units > 1000 else 50)
    work = seconds(compute)
    what = f"{units:,} units of {host[0].nbytes / 1000:.3g} KB up"
    yield Row(what, "products alone", work)
    scattered, in_a_row = list(range(0, 2 * units, 2)), list(range(units))
    for name, slots, triton in (
        ("by the kernel", scattered, True),
        ("a copy each", scattered, False),
        ("as one copy", in_a_row, False),
    ):
        up = partial(copies, slots, triton)
        alone = seconds(partial(up, True, False))
        yield Row(what, f"{name}, alone", alone, 0, units * host[0].nbytes, up=True)
        yield Row(what, f"products, then {name}", seconds(partial(up, False, False)))
        beside = seconds(partial(up, True, True))
        hidden = (alone + work - beside) / min(alone, work)
        note = f"{hidden:.2f} of the shorter hidden"
        yield Row(what, f"{name}, beside products", beside, note=note)
