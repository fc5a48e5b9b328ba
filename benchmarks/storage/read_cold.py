"""What does reading records from the disk cost, beyond the reads themselves?

The disk tier reads batches of 32 records (or of one head of each) into slots, once the page cache
was dropped for the file; and once that was done but the tree's pages of keys (a hundredth of the
file or less) were read again. Beside it: the records' pages read with O_DIRECT by several threads,
without looking for, checking or placing anything; and LMDB's own gets, page fault by page fault.

Fresh random bytes, codec raw, records of three sizes. Measurements are taken in turns: medians of
all repeats, ratios within a repeat.

    python -m benchmarks.storage.read_cold
"""

import argparse
import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import torch

from benchmarks.common.options import add
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
from memstore.block import BlockKey, RecordKey
from memstore.disk.format.keys import record_key

DIRECT_THREADS = (4, 8, 16)


def measure(memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape, whole records or one head of them."""
    shape, size = memory.shape, len(heads) * memory.shape.unit
    count = BATCH * len(heads)
    slab = torch.zeros(count, 2, shape.rows, shape.dim, dtype=torch.float16)
    batches = max(1, min(memory.records // BATCH, (options.cold_megabytes << 20) // (BATCH * size)))
    kept: list[float] = []
    refused: list[str] = []
    buffers = [mmap.mmap(-1, 2 << 20) for _ in range(max(DIRECT_THREADS))]
    for buffer in buffers:
        buffer.write(bytes(len(buffer)))  # its pages are there
    views = [memoryview(buffer) for buffer in buffers]

    def disk(_: int, *, keys: bool = False) -> float:
        asked = [
            [BlockKey(1, 0, block, head) for block in drawn for head in heads]
            for drawn in memory.sample(batches)
        ]
        kept.append(memory.drop_cache())
        if keys:
            with memory.database.read() as txn:
                txn.extents_of(
                    "blocks",
                    [record_key(RecordKey(1, block, 0)) for block in range(memory.records)],
                )
        return gigabytes(
            batches * BATCH * size,
            lambda: [memory.tier.read(units, slab, range(count)) for units in asked],
        )

    def gets(_: int) -> float:
        few = memory.sample(1)
        kept.append(memory.drop_cache())

        def run() -> None:
            for drawn in few:
                with memory.database.read() as txn:
                    for block in sorted(drawn):
                        view = txn.view("blocks", record_key(RecordKey(1, block, 0)))
                        assert view is not None
                        view[len(view) - shape.record :][:size].tobytes()

        return gigabytes(len(few) * BATCH * size, run)

    def direct(threads: int) -> Callable[[int], float]:
        def measure(_: int) -> float:
            asked = [sorted(pages(drawn)) for drawn in memory.sample(batches)]
            kept.append(memory.drop_cache())
            try:
                file = os.open(memory.file, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                refused.append(os.strerror(errno.EINVAL))
                return float("nan")

            def share(thread: int, ranges: Sequence[tuple[int, int]]) -> None:
                for start, end in ranges[thread::threads]:
                    os.preadv(file, [views[thread][: end - start]], start)

            def run() -> None:
                for ranges in asked:
                    list(pool.map(share, range(threads), repeat(ranges)))

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(time.sleep, [0.01] * threads))  # they are there
                rate = gigabytes(batches * BATCH * size, run)
            os.close(file)
            return rate

        return measure

    def pages(drawn: Sequence[int]) -> list[tuple[int, int]]:
        """The file's ranges, in whole pages, that hold header and wanted heads of some records."""
        ranges = []
        with memory.database.read() as txn:
            for block in drawn:
                place = txn.extents_of("blocks", [record_key(RecordKey(1, block, 0))])[0]
                assert place is not None
                start = place.offset + place.size - shape.record + heads[0] * shape.unit
                header = (place.offset // mmap.PAGESIZE, place.offset // mmap.PAGESIZE + 1)
                head = (start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE + 1)
                ranges += [header, head] if head[0] > header[1] else [(header[0], head[1])]
        return [(first * mmap.PAGESIZE, end * mmap.PAGESIZE) for first, end in ranges]

    runs: dict[str, Callable[[int], float]] = {
        "disk": disk,
        "keyed": partial(disk, keys=True),
        "gets": gets,
    }
    runs |= {f"direct{threads}": direct(threads) for threads in DIRECT_THREADS}
    for name in ("disk", "gets"):
        runs[name](0)  # warm up: the code, not the file
    kept.clear()
    found = interleaved(runs, options.repeats)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    row: dict[str, Any] = {
        "record": shape.name,
        "heads": len(heads),
        **{f"{name}_gb_s": rate for name, rate in medians.items()},
        "to_gets": paired_ratio(found["disk"], found["gets"]),
        "pages_kept": max(kept),
    }
    if refused:
        row["direct_refused"] = refused[0]
    else:
        best = max((name for name in medians if name.startswith("direct")), key=medians.__getitem__)
        row |= {"best_direct": best, "to_direct": paired_ratio(found["disk"], found[best])}
        row["keyed_to_direct"] = paired_ratio(found["keyed"], found[best])
    return row


def main() -> None:
    arguments = reading_parser(__doc__)
    add(arguments, "--cold-megabytes", 16, "to read in one measurement")
    add(
        arguments,
        "--pause",
        0,
        "seconds before each measurement, where a disk is fast in bursts only",
        type=float,
    )
    options = arguments.parse_args()
    begin(options)
    rows = []
    for memory, heads in memories(options):
        memory.pause = options.pause
        rows.append(measure(memory, heads, options))
    print("\nCold, the page cache dropped for the file, batches of 32 into slots (GB/s)\n")
    head = ["record", "read", "disk tier", "keys there", "O_DIRECT, threads", "ratio"]
    print(table([*head, "keys there", "LMDB gets", "ratio", "pages kept"], list(map(line, rows))))
    if max(row["pages_kept"] for row in rows) > 0.01:
        print("\nThe system kept more than 1% of the pages: these are not cold reads.")
    write_part(options, "cold", rows)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "direct_refused" in row:
        direct = f"{row['direct_refused']} | - | -"
    else:
        best, threads = row["best_direct"], row["best_direct"].removeprefix("direct")
        direct = (
            f"{number(row[best + '_gb_s'])}, {threads} | {spread(row['to_direct'])} | "
            f"{spread(row['keyed_to_direct'])}"
        )
    return (
        f"{wanted(row)} | {number(row['disk_gb_s'])} | {number(row['keyed_gb_s'])} | {direct} | "
        f"{number(row['gets_gb_s'])} | {spread(row['to_gets'])} | {100 * row['pages_kept']:.1f}%"
    )


if __name__ == "__main__":
    main()
