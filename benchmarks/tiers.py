"""What the tiers cost beyond the work that nobody can save, as ratios within one run.

warm      the disk tier reads batches of 32 records (or of one head of each) that the page cache
holds into slots.
          Beside it, from main memory: the same bytes copied and their XXH3-64 taken, a record at a
          time; and the same in the pieces that slots ask for (K and V apart, a checksum a head).
cold      the same once the page cache was dropped for the file; and once that was done but the
tree's pages of keys
          (a hundredth of the file or less) were read again. Beside it: the records' pages read with
          O_DIRECT by several threads, without looking for, checking or placing anything; and LMDB's
          own gets, page fault by page fault.
ingest    a document written through MemoryStore.write_document, and records through DiskTier.write
alone, every commit
          synced. Beside them: as many bytes of one file written in a row and synced as often.
host      a lease on 32 units that the host tier holds.

Data are fresh random bytes, codec raw. Measurements are taken in turns, medians of all repeats,
ratios within a repeat.

    python benchmarks/tiers.py --out results/tiers.json
"""

import argparse
import ctypes
import errno
import json
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from common import interleaved, paired_ratio, table
from torch import Tensor
from xxhash import xxh3_64_digest

from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.disk.database import Database
from memstore.disk.keys import block_key
from memstore.disk.signature import Signature
from memstore.store.writer import COMMIT_BYTES
from memstore.tiers.disk import DiskTier

BATCH = 32
DIRECT_THREADS = (4, 8, 16)
CHUNK_BLOCKS = 8
WARM_BATCHES = 60  # of each kind, in turns, in one repeat


class Shape(NamedTuple):
    """A record's geometry; values are float16."""

    name: str
    heads: int
    rows: int
    dim: int

    @property
    def unit(self) -> int:
        """Bytes of one head's K and V."""
        return 4 * self.rows * self.dim

    @property
    def record(self) -> int:
        """Bytes of all heads."""
        return self.heads * self.unit


SHAPES = (Shape("16 KB", 4, 32, 32), Shape("204 KB", 8, 50, 128), Shape("816 KB", 32, 50, 128))


def random_tensor(*shape: int) -> Tensor:
    """Fresh random bits as float16."""
    bits = np.frombuffer(bytearray(random.randbytes(2 * int(np.prod(shape)))), dtype=np.int16)
    return torch.from_numpy(bits).view(torch.float16).reshape(shape)


class Memory:
    """A database of one document's records of one layer, and a disk tier over it."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path, self.shape, self.records = path, shape, 0
        self.pause = 0.0
        self.database = Database.create(path, lambda txn: None)
        self.tier = self._tier()

    def _tier(self) -> DiskTier:
        _, heads, rows, dim = self.shape
        return DiskTier(
            self.database,
            num_kv_heads=heads,
            block_size=rows,
            head_dim=dim,
            kv_dtype="float16",
            codec="raw",
        )

    @property
    def file(self) -> Path:
        """The data file."""
        return self.path / "data.mdb"

    def write(self, size: int, blocks: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Add records of `size` bytes, in transactions of COMMIT_BYTES."""
        each = max(1, COMMIT_BYTES // self.shape.record)
        with self.database.writer():
            for first in range(self.records, self.records + size // self.shape.record, each):
                end = min(first + each, self.records + size // self.shape.record)
                fresh = blocks or [
                    tuple(random_tensor(2, *self.shape[1:])) for _ in range(first, end)
                ]

                def work(
                    txn: Any, first: int = first, end: int = end, fresh: Sequence[Any] = fresh
                ) -> None:
                    for block in range(first, end):
                        k, v = fresh[(block - first) % len(fresh)]
                        self.tier.write(txn, 1, block, 0, k, v, self.shape.rows)

                self.database.write(work)
        self.records += size // self.shape.record

    def reopen(self) -> None:
        """Open anew: nothing of the file is mapped."""
        self.database.close()
        self.database = Database.open(self.path)
        self.tier = self._tier()

    def sample(self, batches: int) -> list[list[int]]:
        """Batches of random records, none of them twice."""
        drawn = random.sample(range(self.records), batches * BATCH)
        return [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]

    def drop_cache(self) -> float:
        """Have the system forget the file's pages, and open it anew; return the share of them that
        it kept.
        """
        self.database.close()
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())
            time.sleep(self.pause)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            kept = resident(file.fileno())
        self.reopen()
        return kept


def resident(file: int) -> float:
    """The share of a file's pages that the page cache holds (mincore)."""
    size = os.fstat(file).st_size
    with mmap.mmap(file, size, prot=mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        array = np.frombuffer(mapped, dtype=np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size), pages
        )
        del array
    assert not failed
    return sum(page & 1 for page in pages) / len(pages)


def gigabytes(size: int, run: Callable[[], object]) -> float:
    """GB/s."""
    began = time.perf_counter()
    run()
    return size / (time.perf_counter() - began) / 1e9


# Warm


def warm_part(memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
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
    for _ in range(80):  # the tier stops asking the disk after 64 batches that did not need it
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


# Cold


def cold_part(memory: Memory, heads: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
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
                txn.places_of("blocks", [block_key(1, block, 0) for block in range(memory.records)])
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
                        view = txn.view("blocks", block_key(1, block, 0))
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
                place = txn.places_of("blocks", [block_key(1, block, 0)])[0]
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


# Ingest


def ingest_part(work: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape, in new memories."""
    size = min(options.megabytes << 20, 128 << 20)
    signature = Signature("aa", "bb", {}, "float16", 1, (0,), shape.heads, shape.dim, shape.rows)
    n = max(1, size // (shape.record * CHUNK_BLOCKS))  # chunks
    size = n * shape.record * CHUNK_BLOCKS
    kinds = 1 + (64 << 20) // (shape.record * CHUNK_BLOCKS)
    chunks = [
        random_tensor(2, CHUNK_BLOCKS, shape.heads, shape.rows, shape.dim)
        for _ in range(min(n, kinds))
    ]
    landmarks = random_tensor(CHUNK_BLOCKS, shape.heads, shape.dim)
    ids = np.arange(CHUNK_BLOCKS * shape.rows)
    noise = memoryview(random.randbytes(COMMIT_BYTES))
    place = work / "ingest"

    def store(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        with MemoryStore.create(place, signature, codec="raw", host_budget=256 << 20) as store:

            def run() -> None:
                settings = {"chunk_blocks": CHUNK_BLOCKS, "top_k": 4}
                writer = store.write_document("noise", source_hash="1", settings=settings)
                assert writer is not None
                with writer:
                    for number in range(n):
                        k, v = chunks[number % len(chunks)]
                        writer.add_chunk(ids, 0, {0: (k, v, landmarks)})
                    writer.finish()

            return gigabytes(size, run)

    def tier(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        memory = Memory(place, shape)
        blocks = [
            (k[i], v[i])
            for k, v in chunks[: max(1, COMMIT_BYTES // (shape.record * CHUNK_BLOCKS))]
            for i in range(CHUNK_BLOCKS)
        ]
        rate = gigabytes(size, lambda: memory.write(size, blocks))
        memory.database.close()
        return rate

    def device(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        file = os.open(place / "file", os.O_WRONLY | os.O_CREAT)

        def run() -> None:
            for start in range(0, size, COMMIT_BYTES):
                os.write(file, noise[: min(COMMIT_BYTES, size - start)])
                os.fdatasync(file)

        rate = gigabytes(size, run)
        os.close(file)
        return rate

    runs = {"store": store, "tier": tier, "device": device}
    for run in runs.values():
        run(0)
    found = interleaved(runs, options.repeats)
    shutil.rmtree(place, ignore_errors=True)
    return {
        "record": shape.name,
        **{f"{name}_gb_s": statistics.median(rates) for name, rates in found.items()},
        "store_to_device": paired_ratio(found["store"], found["device"]),
        "tier_to_device": paired_ratio(found["tier"], found["device"]),
    }


# Host


def host_part(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape's units, leased in batches of 32 that the host tier holds."""
    signature = Signature("aa", "bb", {}, "float16", 1, (0,), shape.heads, shape.dim, shape.rows)
    blocks = max(BATCH, 2048 // shape.heads)
    with (
        MemoryStore.in_memory(signature, host_budget=2 * blocks * shape.record) as store,
        store.scratch() as scratch,
    ):
        for _ in range(blocks):
            k, v = torch.zeros(2, 1, shape.heads, shape.rows, shape.dim, dtype=torch.float16)
            scratch.add(0, k, v, torch.zeros(1, shape.heads, shape.dim, dtype=torch.float16))
        every = [
            BlockKey(scratch.document, 0, block, head)
            for block in range(blocks)
            for head in range(shape.heads)
        ]

        def once(_: int) -> float:
            batches = [random.sample(every, BATCH) for _ in range(200)]
            began = time.perf_counter()
            for units in batches:
                with store.lease(units):
                    pass
            return (time.perf_counter() - began) / (len(batches) * BATCH) * 1e6

        once(0)
        times = [once(repeat) for repeat in range(options.repeats)]
    return {
        "record": shape.name,
        "microseconds_a_unit": statistics.median(times),
        "least": min(times),
    }


# Reporting


def number(value: float) -> str:
    """Two decimals, three where there is little."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def ratio(value: dict[str, float] | None) -> str:
    """Median and range of ratios."""
    return (
        "-"
        if value is None
        else f"{value['median']:.2f} ({value['least']:.2f}-{value['greatest']:.2f})"
    )


def print_tables(results: dict[str, Any]) -> None:
    """Every part that was measured."""
    what = {True: "one head", False: "whole"}
    if results.get("warm"):
        print("\nWarm, batches of 32 into slots (GB/s)\n")
        head = [
            "record",
            "read",
            "disk tier",
            "µs a record",
            "copy + XXH3",
            "ratio",
            "the same in pieces",
            "ratio",
        ]
        print(
            table(
                head,
                [
                    [
                        row["record"],
                        what[row["heads"] == 1],
                        number(row["disk_gb_s"]),
                        number(row["microseconds_a_record"]),
                        number(row["record_gb_s"]),
                        ratio(row["to_record"]),
                        number(row["pieces_gb_s"]),
                        ratio(row["to_pieces"]),
                    ]
                    for row in results["warm"]
                ],
            )
        )
    if results.get("cold"):
        print("\nCold, the page cache dropped for the file, batches of 32 into slots (GB/s)\n")
        head = [
            "record",
            "read",
            "disk tier",
            "keys there",
            "O_DIRECT, threads",
            "ratio",
            "keys there",
            "LMDB gets",
            "ratio",
            "pages kept",
        ]
        rows = []
        for row in results["cold"]:
            direct = row.get("direct_refused") or (
                f"{number(row[row['best_direct'] + '_gb_s'])}, "
                f"{row['best_direct'].removeprefix('direct')}"
            )
            rows.append(
                [
                    row["record"],
                    what[row["heads"] == 1],
                    number(row["disk_gb_s"]),
                    number(row["keyed_gb_s"]),
                    direct,
                    ratio(row.get("to_direct")),
                    ratio(row.get("keyed_to_direct")),
                    number(row["gets_gb_s"]),
                    ratio(row["to_gets"]),
                    f"{100 * row['pages_kept']:.1f}%",
                ]
            )
        print(table(head, rows))
        if max(row["pages_kept"] for row in results["cold"]) > 0.01:
            print(
                "\nThe system kept more than 1% of the pages when told to drop them: these are not "
                "cold reads."
            )
    if results.get("ingest"):
        print(f"\nIngest, a commit every {COMMIT_BYTES >> 20} MB, each synced (GB/s)\n")
        head = [
            "record",
            "write_document",
            "DiskTier.write",
            "device",
            "write_document : device",
            "tier : device",
        ]
        print(
            table(
                head,
                [
                    [
                        row["record"],
                        number(row["store_gb_s"]),
                        number(row["tier_gb_s"]),
                        number(row["device_gb_s"]),
                        ratio(row["store_to_device"]),
                        ratio(row["tier_to_device"]),
                    ]
                    for row in results["ingest"]
                ],
            )
        )
    if results.get("host"):
        print("\nHost tier hit: a lease on 32 held units, no copy\n")
        print(
            table(
                ["record", "µs a unit", "least"],
                [
                    [row["record"], number(row["microseconds_a_unit"]), number(row["least"])]
                    for row in results["host"]
                ],
            )
        )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--parts", nargs="+", default=["warm", "cold", "ingest", "host"])
    options.add_argument(
        "--megabytes", type=int, default=256, help="size of each memory that is read"
    )
    options.add_argument(
        "--cold-megabytes", type=int, default=16, help="to read in one cold measurement"
    )
    options.add_argument(
        "--pause",
        type=float,
        default=0,
        help="seconds before each cold measurement, where a disk is fast in bursts only",
    )
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the data and the choice of records (default: new)",
    )
    options.add_argument("--out", type=Path, help="write the results here as JSON")
    options.add_argument(
        "--work", type=Path, help="keep memories in this directory (default: a temporary one)"
    )
    given = options.parse_args()
    common.prepare(1)
    random.seed(given.seed)
    results: dict[str, Any] = {part: [] for part in given.parts}
    with tempfile.TemporaryDirectory(dir=given.work) as directory:
        for shape in SHAPES:
            if {"warm", "cold"} & set(given.parts):
                memory = Memory(Path(directory) / "memory", shape)
                memory.pause = given.pause
                memory.write(given.megabytes << 20)
                for heads in (range(shape.heads), [shape.heads // 2]):
                    if "warm" in given.parts:
                        results["warm"].append(warm_part(memory, heads, given))
                    if "cold" in given.parts:
                        results["cold"].append(cold_part(memory, heads, given))
                memory.database.close()
                shutil.rmtree(memory.path)
            if "ingest" in given.parts:
                results["ingest"].append(ingest_part(Path(directory), shape, given))
            if "host" in given.parts:
                results["host"].append(host_part(shape, given))
            print(f"{shape.name} measured", flush=True)
    print_tables(results)
    if given.out is not None:
        settings = {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(given).items()
        }
        settings["work"], settings["out"] = None, given.out.name
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            json.dumps({"options": settings, "machine": common.machine(), **results}, indent=1)
        )
        print(f"\nwritten: {given.out}")


if __name__ == "__main__":
    main()
