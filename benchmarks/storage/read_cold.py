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


class Cold:
    """Ways to read batches of a memory whose pages the cache has dropped, each in GB/s of what is
    wanted: whole records, or one head of them.
    """

    def __init__(self, memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> None:
        self.memory, self.shape, self.heads = memory, memory.shape, heads
        self.size = len(heads) * self.shape.unit  # bytes of a record that are wanted
        most = (options.cold_megabytes << 20) // (BATCH * self.size)
        self.batches = max(1, min(memory.records // BATCH, most))
        count = BATCH * len(heads)
        self.slots = range(count)
        self.slab = torch.zeros(count, 2, self.shape.rows, self.shape.dim, dtype=torch.float16)
        self.kept: list[float] = []  # share of the pages that the system kept
        self.refused: str | None = None  # why O_DIRECT is not to be had
        buffers = [mmap.mmap(-1, 2 << 20) for _ in range(max(DIRECT_THREADS))]
        for buffer in buffers:
            buffer.write(bytes(len(buffer)))  # its pages are there
        self._views = [memoryview(buffer) for buffer in buffers]

    def disk(self, _: int, *, keys: bool = False) -> float:
        """The disk tier; keys: once the tree's pages of keys were read again."""
        asked = [
            [BlockKey(1, 0, block, head) for block in drawn for head in self.heads]
            for drawn in self.memory.sample(self.batches)
        ]
        self._drop_cache()
        if keys:
            with self.memory.database.read() as txn:
                every = range(self.memory.records)
                txn.extents_of("blocks", [record_key(RecordKey(1, block, 0)) for block in every])
        return gigabytes(
            self.batches * BATCH * self.size,
            lambda: [self.memory.tier.read(units, self.slab, self.slots) for units in asked],
        )

    def gets(self, _: int) -> float:
        """LMDB's own gets, of one batch."""
        (drawn,) = self.memory.sample(1)
        self._drop_cache()

        def run() -> None:
            with self.memory.database.read() as txn:
                for block in sorted(drawn):
                    view = txn.view("blocks", record_key(RecordKey(1, block, 0)))
                    assert view is not None
                    view[len(view) - self.shape.record :][: self.size].tobytes()

        return gigabytes(BATCH * self.size, run)

    def direct(self, threads: int, _: int) -> float:
        """The records' pages with O_DIRECT; not a number where the file system refuses that."""
        asked = [sorted(self._pages(drawn)) for drawn in self.memory.sample(self.batches)]
        self._drop_cache()
        try:
            file = os.open(self.memory.file, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.refused = os.strerror(errno.EINVAL)
            return float("nan")

        def share(thread: int, ranges: Sequence[tuple[int, int]]) -> None:
            for start, end in ranges[thread::threads]:
                os.preadv(file, [self._views[thread][: end - start]], start)

        def run() -> None:
            for ranges in asked:
                list(pool.map(share, range(threads), repeat(ranges)))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.01] * threads))  # they are there
            rate = gigabytes(self.batches * BATCH * self.size, run)
        os.close(file)
        return rate

    def _drop_cache(self) -> None:
        self.kept.append(self.memory.drop_cache())

    def _pages(self, drawn: Sequence[int]) -> list[tuple[int, int]]:
        """The file's ranges, in whole pages, that hold header and wanted heads of some records."""
        ranges = []
        with self.memory.database.read() as txn:
            for block in drawn:
                place = txn.extents_of("blocks", [record_key(RecordKey(1, block, 0))])[0]
                assert place is not None
                start = place.offset + place.size - self.shape.record
                start += self.heads[0] * self.shape.unit
                header = (place.offset // mmap.PAGESIZE, place.offset // mmap.PAGESIZE + 1)
                head = (start // mmap.PAGESIZE, (start + self.size - 1) // mmap.PAGESIZE + 1)
                ranges += [header, head] if head[0] > header[1] else [(header[0], head[1])]
        return [(first * mmap.PAGESIZE, end * mmap.PAGESIZE) for first, end in ranges]


def measure(memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape, whole records or one head of them."""
    cold = Cold(memory, heads, options)
    runs: dict[str, Callable[[int], float]] = {
        "disk": cold.disk,
        "keyed": partial(cold.disk, keys=True),
        "gets": cold.gets,
    }
    runs |= {f"direct{threads}": partial(cold.direct, threads) for threads in DIRECT_THREADS}
    for name in ("disk", "gets"):
        runs[name](0)  # warm up: the code, not the file
    cold.kept.clear()
    found = interleaved(runs, options.repeats)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    row: dict[str, Any] = {
        "record": memory.shape.name,
        "heads": len(heads),
        **{f"{name}_gb_s": rate for name, rate in medians.items()},
        "to_gets": paired_ratio(found["disk"], found["gets"]),
        "pages_kept": max(cold.kept),
    }
    if cold.refused is not None:
        row["direct_refused"] = cold.refused
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
