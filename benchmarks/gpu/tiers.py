"""The device tier over the page-locked tier: what a hit costs, and a miss by where the unit is."""

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
from memstore.store.open_options import OpenOptions


def cases(setting: Setting) -> list[Case]:
    shape = Shape(2, 8, 16) if setting.tiny else Shape(8, 63, 128)
    return [
        ("hits and misses", partial(leases, setting, shape)),
        ("from disk", partial(from_disk, setting, shape)),
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
    """Times units in no tier: from a file in the page cache, through main memory, to the device."""
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
