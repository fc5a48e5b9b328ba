"""What do hits, reads and writes of records cost, beyond the bytes themselves?

host    Microseconds a block of a lease on 32 blocks that the host tier holds; nothing is copied.
warm    The disk tier reads batches of 32 records that the page cache holds into slots, against
        copying as many bytes in main memory and taking their XXH3-64, and against os.preadv of the
        same records at their known places, which computes no checksums. With --lmcache, a Python
        that has LMCache (0.5.6 was measured), also against the best of some numbers of workers of
        its `fs_native` backend, which loads batches of 32 files of the same size and number and
        computes no checksums.
cold    The same with the page cache dropped for the file, against reading the records' pages with
        O_DIRECT by 4, 8 or 16 threads (the best of them), and against LMDB's own gets.
write   A document written through MemoryStore.write_document, against as many bytes of one file
        written in a row and synced as often.

Fresh random bytes, codec raw. Taken in turns; medians of the repeats, and a
ratio is the median of the ratios within a repeat.

    python -m benchmarks.storage.reads
    python -m benchmarks.storage.reads --parts warm --records "16 KB" "49 KB" "204 KB" "2 MB"
    python -m benchmarks.storage.reads --parts warm --records "832 KB" "4 MB" --lmcache PYTHON
"""

import argparse
import errno
import mmap
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_digest

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.storage.records import BATCH, CHUNK_BLOCKS, SHAPES, Memory, Shape
from memstore import MemoryStore
from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import IngestSettings
from memstore.disk.lmdb.transaction import record_key
from memstore.store.writer import COMMIT_BYTES

PARTS = {
    "host": ["host hit, µs a block"],
    "warm": ["warm, GB/s", "of copy and checksum", "preadv, GB/s", "of preadv"],
    "cold": ["cold, GB/s", "of O_DIRECT", "of LMDB gets"],
    "write": ["written, GB/s", "of one file"],
}
WARM_BATCHES = 60  # of each kind in one repeat
DIRECT_THREADS = (4, 8, 16)
LMCACHE = Path(__file__).with_name("lmcache_files.py")
WORKERS = (1, 2, 4)  # of LMCache


def main() -> None:
    options = plain_parser(__doc__)
    add(options, "--parts", list(PARTS), choices=PARTS)
    add(options, "--records", ["16 KB", "204 KB", "816 KB"], "their sizes", choices=SHAPES)
    add(options, "--megabytes", 256, "size of each memory")
    add(options, "--cold-megabytes", 16, "to read in one cold measurement")
    add(options, "--repeats", 7)
    add(options, "--lmcache", None, "a Python that has LMCache, for warm reads", type=str)
    add(options, "--work", None, "where memories are made (default: temporary)", type=Path)
    given = options.parse_args()
    prepare(given.threads)
    random.seed(given.seed)
    rows = []
    with workplace(given) as directory:
        for name in given.records:
            rows.append({"record": name} | measure(directory, SHAPES[name], given))
            print(f"{name} measured", flush=True)
    if given.lmcache is not None:
        PARTS["warm"] += ["LMCache, GB/s", "of LMCache"]
    heads = [head for part in given.parts for head in PARTS[part]]
    print(table(["record", *heads], [line(row) for row in rows]))
    if max(row.get("cold", {}).get("pages kept", 0.0) for row in rows) > 0.01:
        print("\nThe system kept more than 1% of the pages: these are not cold reads.")
    write_part(given, "reads", rows)


def measure(directory: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """What every part found of one size."""
    row: dict[str, Any] = {}
    memory = Memory(directory / "records", shape)
    memory.write(options.megabytes << 20)
    for part in options.parts:
        if part == "host":
            row[part] = host_hits(shape, options)
        elif part == "write":
            row[part] = written(directory / "document", shape, options)
        else:
            row[part] = (warm if part == "warm" else cold)(memory, options)
    memory.close()
    shutil.rmtree(memory.path)
    return row


def line(row: dict[str, Any]) -> list[str]:
    """The cells of a row."""
    cells = [row["record"]]
    for part, found in row.items():
        if part == "host":
            cells.append(number(found))
        elif part == "warm":
            cells += [number(found["gb_s"]), spread(found["ratio"])]
            cells += [number(found["preadv"]), spread(found["to preadv"])]
            if "lmcache" in found:
                cells += [number(found["lmcache"]), spread(found["to lmcache"])]
        elif part == "cold":
            direct = spread(found["to direct"]) if "to direct" in found else "refused"
            cells += [number(found["gb_s"]), direct, spread(found["to gets"])]
        elif part == "write":
            cells += [number(found["gb_s"]), spread(found["ratio"])]
    return cells


def host_hits(shape: Shape, options: argparse.Namespace) -> float:
    """Microseconds for each block of a lease on units in the host tier."""
    blocks = max(BATCH, 2048 // shape.heads)
    with (
        MemoryStore.in_memory(shape.signature, host_budget=2 * blocks * shape.record) as store,
        store.retrieval.session_document() as scratch,
    ):
        for _ in range(blocks):
            k, v = torch.zeros(2, 1, shape.heads, shape.rows, shape.dim, dtype=torch.float16)
            scratch.add(0, k, v, torch.zeros(1, shape.heads, shape.dim, dtype=torch.float16))
        every = [
            BlockKey(scratch.document, 0, block, head)
            for block in range(blocks)
            for head in range(shape.heads)
        ]

        def once() -> float:
            batches = [random.sample(every, BATCH) for _ in range(200)]
            began = time.perf_counter()
            for units in batches:
                with store.lease(units):
                    pass
            return (time.perf_counter() - began) / (len(batches) * BATCH) * 1e6

        once()  # warm up
        return statistics.median(once() for _ in range(options.repeats))


def warm(memory: Memory, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s of records in the page cache, and ratios to a copy with a checksum and to preadv."""
    shape, size = memory.shape, memory.shape.record
    slab, slots = slab_of(shape)
    source = memoryview(np.random.default_rng(0).bytes(memory.records * size))
    copied = memoryview(bytearray(BATCH * size))
    memory.reopen()
    with memory.database.read() as txn:
        for _ in txn.scan("blocks"):  # brings every page into the page cache
            pass
        keys = [record_key(RecordKey(1, block, 0)) for block in range(memory.records)]
        places = [one for one in txn.extents_of("blocks", keys) if one is not None]
    parts = [memoryview(bytearray(places[0].size)) for _ in range(BATCH)]
    file = os.open(memory.file, os.O_RDONLY)

    def disk(_: int) -> float:
        units = units_of(shape, memory.sample(1)[0])
        return gigabytes(BATCH * size, lambda: memory.tier.read_from(units, slab, slots))

    def copy(_: int) -> float:
        def run() -> None:
            for place, start in enumerate(starts):
                data = source[start : start + size]
                copied[place * size : (place + 1) * size] = data
                xxh3_64_digest(data)

        starts = [block * size for block in memory.sample(1)[0]]
        return gigabytes(BATCH * size, run)

    def preadv(_: int) -> float:
        def run() -> None:
            for part, offset in zip(parts, offsets):
                os.preadv(file, [part], offset)

        offsets = [places[block].offset for block in memory.sample(1)[0]]
        return gigabytes(BATCH * size, run)

    runs: dict[str, Callable[[int], float]] = {"disk": disk, "copy": copy, "preadv": preadv}
    with lmcache(memory, options) as loads:
        runs |= loads
        for _ in range(20):  # warm up
            for run in runs.values():
                run(0)
        found: dict[str, list[float]] = {name: [] for name in runs}
        # a batch at a time: most of them end before another process gets its turn
        for _ in range(options.repeats):
            for name, rates in interleaved(runs, WARM_BATCHES).items():
                found[name].append(statistics.median(rates))
    os.close(file)
    more: dict[str, Any] = {}
    if loads:
        best = max(loads, key=lambda name: statistics.median(found[name]))
        rates = found[best]
        more = {"lmcache": statistics.median(rates), "workers": int(best.split()[1])}
        more |= {"to lmcache": paired_ratio(found["disk"], rates)}
    return more | {
        "gb_s": statistics.median(found["disk"]),
        "ratio": paired_ratio(found["disk"], found["copy"]),
        "preadv": statistics.median(found["preadv"]),
        "to preadv": paired_ratio(found["disk"], found["preadv"]),
    }


@contextmanager
def lmcache(
    memory: Memory, options: argparse.Namespace
) -> Iterator[dict[str, Callable[[int], float]]]:
    """Loads of batches by LMCache for every number of workers, where it is, as GB/s."""
    if options.lmcache is None:
        yield {}
        return
    size, batches = memory.shape.record, memory.records // BATCH
    files = memory.path.with_name("files")
    files.mkdir()
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    with subprocess.Popen(
        [options.lmcache, LMCACHE, files, *map(str, (size, BATCH, batches, *WORKERS))],
        env=os.environ | quiet,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def load(workers: int, _: int) -> float:
            print(workers, random.randrange(batches), file=asked, flush=True)
            return BATCH * size / float(answers.readline()) / 1e9

        if answers.readline() != "ready\n":
            raise SystemExit(f"{options.lmcache} {LMCACHE} does not run; try it by hand")
        yield {f"lmcache {workers}": partial(load, workers) for workers in WORKERS}
    shutil.rmtree(files)


def units_of(shape: Shape, blocks: Sequence[int]) -> list[BlockKey]:
    """All heads of some blocks."""
    return [BlockKey(1, 0, block, head) for block in blocks for head in range(shape.heads)]


def slab_of(shape: Shape) -> tuple[torch.Tensor, list[tuple[int]]]:
    """A slab with a slot for each unit of a batch of records, and its slots."""
    count = BATCH * shape.heads
    slab = torch.zeros(count, 2, shape.rows, shape.dim, dtype=torch.float16)
    return slab, [(slot,) for slot in range(count)]


def cold(memory: Memory, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s of records whose pages the page cache has dropped, and ratios to other ways."""
    reads = Cold(memory, options.cold_megabytes << 20)
    runs: dict[str, Callable[[int], float]] = {"disk": reads.disk, "gets": reads.gets}
    runs |= {f"direct{threads}": partial(reads.direct, threads) for threads in DIRECT_THREADS}
    for name in ("disk", "gets"):
        runs[name](0)  # warm up: the code, not the file
    reads.kept.clear()
    found = interleaved(runs, options.repeats)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    row: dict[str, Any] = {
        "gb_s": medians["disk"],
        "to gets": paired_ratio(found["disk"], found["gets"]),
        "pages kept": max(reads.kept),
    }
    if reads.direct_refused:
        return row
    best = max((name for name in medians if name.startswith("direct")), key=medians.__getitem__)
    return row | {"best direct": best, "to direct": paired_ratio(found["disk"], found[best])}


class Cold:
    """Ways to read batches of records whose pages the page cache has dropped, each in GB/s."""

    def __init__(self, memory: Memory, most: int) -> None:
        """most: bytes to read in one measurement."""
        self.memory, self.size = memory, memory.shape.record
        self.batches = max(1, min(memory.records // BATCH, most // (BATCH * self.size)))
        self.slab, self.slots = slab_of(memory.shape)
        self.kept: list[float] = []  # share of the pages that the system kept
        self.direct_refused = False
        buffers = [mmap.mmap(-1, 2 << 20) for _ in range(max(DIRECT_THREADS))]
        for buffer in buffers:
            buffer.write(bytes(len(buffer)))  # touches its pages
        self._views = [memoryview(buffer) for buffer in buffers]

    def disk(self, _: int) -> float:
        """Reads from the disk tier."""
        asked = [units_of(self.memory.shape, blocks) for blocks in self.memory.sample(self.batches)]
        self.kept.append(self.memory.drop_cache())
        return gigabytes(
            self.batches * BATCH * self.size,
            lambda: [self.memory.tier.read_from(units, self.slab, self.slots) for units in asked],
        )

    def gets(self, _: int) -> float:
        """Reads one batch by LMDB's own gets."""
        (drawn,) = self.memory.sample(1)
        self.kept.append(self.memory.drop_cache())

        def run() -> None:
            with self.memory.database.read() as txn:
                for block in sorted(drawn):
                    view = txn.view("blocks", record_key(RecordKey(1, block, 0)))
                    assert view is not None
                    view[len(view) - self.size :].tobytes()

        return gigabytes(BATCH * self.size, run)

    def direct(self, threads: int, _: int) -> float:
        """The records' pages with O_DIRECT; not a number where the file system refuses that."""
        asked = [sorted(self._pages(drawn)) for drawn in self.memory.sample(self.batches)]
        self.kept.append(self.memory.drop_cache())
        try:
            file = os.open(self.memory.file, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct_refused = True
            return float("nan")

        def share(thread: int, ranges: Sequence[tuple[int, int]]) -> None:
            for start, end in ranges[thread::threads]:
                os.preadv(file, [self._views[thread][: end - start]], start)

        def run() -> None:
            for ranges in asked:
                list(pool.map(share, range(threads), repeat(ranges)))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.01] * threads))  # starts the threads
            rate = gigabytes(self.batches * BATCH * self.size, run)
        os.close(file)
        return rate

    def _pages(self, drawn: Sequence[int]) -> list[tuple[int, int]]:
        """The file's ranges, in whole pages, that hold some records."""
        ranges = []
        with self.memory.database.read() as txn:
            places = txn.extents_of("blocks", [record_key(RecordKey(1, one, 0)) for one in drawn])
        for place in places:
            assert place is not None
            first = place.offset // mmap.PAGESIZE
            end = (place.offset + place.size - 1) // mmap.PAGESIZE + 1
            ranges.append((first * mmap.PAGESIZE, end * mmap.PAGESIZE))
        return ranges


def written(place: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s of writing a document, and the ratio to writing one file."""
    chunk = shape.record * CHUNK_BLOCKS
    count = max(1, min(options.megabytes << 20, 128 << 20) // chunk)
    size = count * chunk
    chunks = [
        torch.randn(2, CHUNK_BLOCKS, shape.heads, shape.rows, shape.dim).half()
        for _ in range(min(count, 1 + (64 << 20) // chunk))
    ]
    landmarks = torch.randn(CHUNK_BLOCKS, shape.heads, shape.dim).half()
    ids = np.arange(CHUNK_BLOCKS * shape.rows)
    noise = memoryview(random.randbytes(COMMIT_BYTES))

    def document(_: int) -> float:
        with MemoryStore.create(place, shape.signature, codec="raw") as store:

            def run() -> None:
                settings = IngestSettings(chunk_blocks=CHUNK_BLOCKS, top_k=4)
                writer = store.write_document("noise", source_hash="1", settings=settings)
                assert writer is not None
                with writer:
                    for number in range(count):
                        k, v = chunks[number % len(chunks)]
                        writer.add_chunk(ids, 0, {0: (k, v, landmarks)})
                    writer.finish()

            rate = gigabytes(size, run)
        shutil.rmtree(place)
        return rate

    def file(_: int) -> float:
        target = os.open(place, os.O_WRONLY | os.O_CREAT)

        def run() -> None:
            for start in range(0, size, COMMIT_BYTES):
                os.write(target, noise[: min(COMMIT_BYTES, size - start)])
                os.fdatasync(target)

        rate = gigabytes(size, run)
        os.close(target)
        place.unlink()
        return rate

    runs = {"document": document, "file": file}
    for run in runs.values():
        run(0)  # warm up
    found = interleaved(runs, options.repeats)
    return {"gb_s": statistics.median(found["document"]), "ratio": paired_ratio(*found.values())}


def gigabytes(size: int, run: Callable[[], object]) -> float:
    """GB/s."""
    began = time.perf_counter()
    run()
    return size / (time.perf_counter() - began) / 1e9


def number(value: float) -> str:
    """Two decimals, three below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


if __name__ == "__main__":
    main()
