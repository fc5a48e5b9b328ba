"""What does reading records that the page cache holds cost, beyond the copy and the checksum?

The disk tier reads batches of 32 records (or of one head of each) into slots. Beside it, from main
memory: the same bytes copied and their XXH3-64 taken, a record at a time; and the same in the
pieces that slots ask for (K and V apart, a checksum a head).

Fresh random bytes, codec raw, records of three sizes. Measurements are taken in turns: medians of
all repeats, ratios within a repeat.

    python -m benchmarks.storage.read_warm
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_digest

from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.storage.records import (
    BATCH,
    Memory,
    begin,
    gigabytes,
    memories,
    number,
    reading_parser,
    wanted,
)
from memstore.block import BlockKey

WARM_BATCHES = 60  # of each kind, in turns, in one repeat


def measure(memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape, whole records or one head of them."""
    shape, size = memory.shape, len(heads) * memory.shape.unit
    count = BATCH * len(heads)
    slab = torch.zeros(count, 2, shape.rows, shape.dim, dtype=torch.float16)
    half = shape.unit // 2
    source = memoryview(
        np.random.default_rng(random.randrange(1 << 32)).bytes(memory.records * shape.record)
    )
    whole = memoryview(bytearray(BATCH * size))
    k_bytes, v_bytes = (memoryview(bytearray(count * half)) for _ in range(2))
    memory.reopen()
    with memory.database.read() as txn:
        for _ in txn.scan("blocks"):  # every page is in the page cache, and mapped
            pass
    slots = range(count)

    def disk(_: int) -> float:
        units = [BlockKey(1, 0, block, head) for block in memory.sample(1)[0] for head in heads]
        return gigabytes(BATCH * size, lambda: memory.tier.read(units, slab, slots))

    def a_record(_: int) -> float:
        def run() -> None:
            for place, start in enumerate(starts):
                data = source[start : start + size]
                whole[place * size : (place + 1) * size] = data
                xxh3_64_digest(data)

        starts = [block * shape.record + heads[0] * shape.unit for block in memory.sample(1)[0]]
        return gigabytes(BATCH * size, run)

    def pieces(_: int) -> float:
        def run() -> None:
            for place, start in enumerate(starts):
                data = source[start : start + shape.unit]
                k_bytes[place * half : (place + 1) * half] = data[:half]
                v_bytes[place * half : (place + 1) * half] = data[half:]
                xxh3_64_digest(data)

        starts = [
            block * shape.record + head * shape.unit
            for block in memory.sample(1)[0]
            for head in heads
        ]
        return gigabytes(BATCH * size, run)

    runs = {"disk": disk, "record": a_record, "pieces": pieces}
    for _ in range(20):
        for run in runs.values():
            run(0)
    found: dict[str, list[float]] = {name: [] for name in runs}
    # a batch at a time: most of them are over before another process has its turn
    for _ in range(options.repeats):
        for name, rates in interleaved(runs, WARM_BATCHES).items():
            found[name].append(statistics.median(rates))
    return {
        "record": shape.name,
        "heads": len(heads),
        "microseconds_a_record": size / statistics.median(found["disk"]) / 1e3,
        **{f"{name}_gb_s": statistics.median(rates) for name, rates in found.items()},
        "to_record": paired_ratio(found["disk"], found["record"]),
        "to_pieces": paired_ratio(found["disk"], found["pieces"]),
    }


def main() -> None:
    options = reading_parser(__doc__).parse_args()
    begin(options)
    rows = [measure(memory, heads, options) for memory, heads in memories(options)]
    head = "record | read | disk tier | µs a record | copy + XXH3 | ratio | in pieces | ratio"
    lines = [
        f"{wanted(row)} | {number(row['disk_gb_s'])} | {number(row['microseconds_a_record'])} | "
        f"{number(row['record_gb_s'])} | {spread(row['to_record'])} | "
        f"{number(row['pieces_gb_s'])} | {spread(row['to_pieces'])}"
        for row in rows
    ]
    print("\nWarm, batches of 32 into slots (GB/s)\n\n" + table(head, lines))
    write_part(options, "warm", rows)


if __name__ == "__main__":
    main()
