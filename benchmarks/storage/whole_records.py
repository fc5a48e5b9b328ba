"""What do records of real models' sizes cost to read: a block of one layer, or a passage with all
layers? Compared with LMCache's files.

The disk tier reads batches of 32 records that the page cache holds into slots, every checksum
computed. os.preadv alone reads the same records at their known places into the same slots, without
checksums. With --lmcache, a Python that has LMCache (0.5.6 was measured), its `fs_native` backend
loads batches of 32 files of the same size and number, by the functions of `lmcache bench l2` and
for every number of --workers; it computes no checksums.

Fresh random bytes, codec raw. Batches are taken in turns, in an order drawn anew for each turn, so
that whatever else the machine does meets all alike; of a repeat's batches the median and the
fastest tenth count (the latter tells of a machine that has its cores free), then the medians of all
repeats; ratios within a repeat, to the number of workers that was best in all.

    python -m benchmarks.storage.whole_records --lmcache /opt/lmcache/bin/python
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import workplace
from benchmarks.common.options import add
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import paired_ratio
from benchmarks.storage.records import (
    BATCH,
    SHAPES,
    Memory,
    Shape,
    begin,
    gigabytes,
    number,
    reading_parser,
)
from memstore.block import BlockKey, RecordKey
from memstore.disk.format.keys import record_key
from memstore.tiers.disk_tier import DiskTier
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Slots as TierSlots
from memstore.tiers.slots import UnitShape

RECORDS = (
    SHAPES[0],
    Shape("49 KB", 3, 64, 64),
    SHAPES[1],
    Shape("2 MB", 32, 128, 128),
    Shape("832 KB", 1, 36, 5_760),  # a passage of SmolLM2-135M: 30 layers x 3 heads x 64
    Shape("4 MB", 1, 32, 32_768),  # of an 8B model: 32 x 8 x 128
)
WARMING = 20  # batches before the first turn
BASELINE = Path(__file__).with_name("lmcache_files.py")
COUNTED = {"median": 0.5, "fast": 0.9}  # of the rates of a repeat's batches


def measure(work: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape."""
    memory = Memory(work / "memory", shape)
    memory.write(options.megabytes << 20)
    memory.reopen()
    count = BATCH * shape.heads
    slab = TierSlots(count, UnitShape.of_blocks(shape.rows, shape.dim, torch.float16)).slab

    tier = DiskTier(memory.catalog)

    def disk(_: int) -> float:
        blocks = memory.sample(1)[0]
        units = [BlockKey(1, 0, block, head) for block in blocks for head in range(shape.heads)]
        return gigabytes(
            BATCH * shape.record,
            lambda: tier.read_from(units, slab, [(slot,) for slot in range(count)]),
        )

    with memory.database.read() as txn:
        keys = [record_key(RecordKey(1, block, 0)) for block in range(memory.records)]
        places = txn.extents_of("blocks", keys)
    bytes_of_slab = raw_view(slab).reshape(-1).view(np.uint8).data
    file = os.open(memory.file, os.O_RDONLY)
    header = memoryview(bytearray(memory.catalog.blocks.form.header_bytes))
    parts = [
        [header, bytes_of_slab[at : at + shape.record]]
        for at in range(0, BATCH * shape.record, shape.record)
    ]

    def plain(_: int) -> float:
        offsets = [place.offset for block in memory.sample(1)[0] if (place := places[block])]

        def run() -> None:
            for part, offset in zip(parts, offsets):
                os.preadv(file, part, offset)

        return gigabytes(BATCH * shape.record, run)

    runs: dict[str, Callable[[int], float]] = {"disk": disk, "preadv": plain}
    with loads(work / "files", shape, memory.records // BATCH, options) as baselines:
        runs |= baselines
        for run in runs.values():
            for _ in range(WARMING):
                run(0)
        found: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in runs} for kind in COUNTED
        }
        for _ in range(options.repeats):
            for name, rates in shuffled(runs, options.batches).items():
                for kind, share in COUNTED.items():
                    found[kind][name].append(sorted(rates)[int(share * len(rates))])
    os.close(file)
    memory.close()
    shutil.rmtree(memory.path)
    row: dict[str, Any] = {"record": shape.name}
    for kind, of_kind in found.items():
        medians = {name: statistics.median(of_runs) for name, of_runs in of_kind.items()}
        row[kind] = {"gb_s": medians, "to_preadv": paired_ratio(of_kind["disk"], of_kind["preadv"])}
        if baselines:
            best = max(baselines, key=medians.__getitem__)
            row[kind] |= {"best": best, "to_best": paired_ratio(of_kind["disk"], of_kind[best])}
    return row


def shuffled(runs: dict[str, Callable[[int], float]], turns: int) -> dict[str, list[float]]:
    """Each run's rates. A run that comes behind itself, or always behind the same other one, would
    find the processor's caches as no other does.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in random.sample(list(runs), len(runs)):
            found[name].append(runs[name](turn))
    return found


@contextmanager
def loads(
    files: Path, shape: Shape, batches: int, options: argparse.Namespace
) -> Iterator[dict[str, Callable[[int], float]]]:
    """A run for every number of LMCache's workers, where LMCache is."""
    if options.lmcache is None:
        yield {}
        return
    files.mkdir(parents=True)
    given = [shape.record, BATCH, batches, *options.workers]
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    with subprocess.Popen(
        [options.lmcache, BASELINE, files, *map(str, given)],
        env={**os.environ, **quiet},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as baseline:
        assert baseline.stdin is not None and baseline.stdout is not None
        asked, answers = baseline.stdin, baseline.stdout

        def load(workers: int, _: int) -> float:
            print(workers, random.randrange(batches), file=asked, flush=True)
            return BATCH * shape.record / float(answers.readline()) / 1e9

        if answers.readline() != "ready\n":
            raise SystemExit(f"{options.lmcache} {BASELINE} does not run; try it by hand")
        yield {f"lmcache {workers}": partial(load, workers) for workers in options.workers}
    shutil.rmtree(files)


def main() -> None:
    arguments = reading_parser(__doc__)
    add(arguments, "--lmcache", None, "a python that has LMCache", type=str)
    add(arguments, "--workers", [1, 2, 4], "of LMCache")
    add(arguments, "--batches", 40, "of each kind in a repeat")
    options = arguments.parse_args()
    begin(options)
    rows = []
    with workplace(options) as directory:
        for shape in RECORDS:
            rows.append(measure(directory, shape, options))
            print(f"{shape.name} measured", flush=True)
    print("\nWarm, batches of 32 into slots (GB/s)\n\n" + report(rows))
    write_part(options, "whole records", rows)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = ["record", "batches", "disk tier", "preadv alone", "of it"]
    lines = []
    for row in rows:
        for kind, name in zip(COUNTED, ("median", "fastest tenth")):
            found = row[kind]
            rates = found["gb_s"]
            cells = [row["record"], name, number(rates["disk"])]
            cells += [number(rates["preadv"]), spread(found["to_preadv"])]
            if "best" in found:
                best = found["best"]
                cells.append(f"{number(rates[best])}, {best.removeprefix('lmcache ')}")
                cells.append(spread(found["to_best"]))
            lines.append(cells)
    if "best" in rows[0]["median"]:
        head += ["LMCache, workers", "of it"]
    return table(head, lines)


if __name__ == "__main__":
    main()
