"""What this machine can do at best, measured between what is compared with it.

Everything is timed twice: by the clock, and in the time that this process spent on the processor,
which other programs on the machine do not stretch. A share of a limit is of the latter.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from benchmarks.common.timing import interleaved

STREAM = 256 << 20  # bytes; many times what the caches of a processor hold
ROWS, PRODUCTS = 256, 4  # tokens of a matrix product, products that are timed together
FILE, PIECE = 128 << 20, 4 << 20  # bytes


Seconds = dict[str, float]  # clock: of the clock; core: on the processor, of all threads


def measured(
    works: Mapping[str, Callable[[], object]], repeats: int, warm: bool = True
) -> dict[str, Seconds]:
    """Median seconds of each, taken in turns, after one time that does not count where warm."""
    core: dict[str, list[float]] = {name: [] for name in works}

    def once(name: str, _: int) -> float:
        began, busy = time.perf_counter(), time.process_time()
        works[name]()
        core[name].append(time.process_time() - busy)
        return time.perf_counter() - began

    if warm:
        for work in works.values():
            work()
    clock = interleaved({name: partial(once, name) for name in works}, repeats)
    return {
        name: {"clock": statistics.median(clock[name]), "core": statistics.median(core[name])}
        for name in works
    }


class Machine:
    """Main memory and matrix products, as `works` to be measured in turns with others.

    width, inner, dtype: of a linear layer of the model that is compared.
    """

    def __init__(self, width: int, inner: int, dtype: torch.dtype) -> None:
        self._stream = torch.rand(STREAM // 4)  # nonzero: every page is its own
        self._weight = torch.rand(inner, width).to(dtype)
        self._rows = torch.rand(ROWS, width).to(dtype)
        self._flops = 2 * PRODUCTS * ROWS * width * inner

    @property
    def works(self) -> dict[str, Callable[[], object]]:
        """A sum over a large buffer, and products of a chunk of tokens with a layer."""
        return {
            "stream": self._stream.sum,
            "product": lambda: [linear(self._rows, self._weight) for _ in range(PRODUCTS)],
        }

    def limits(self, found: Mapping[str, Seconds]) -> dict[str, float]:
        """Bytes and FLOP a second of a core, by what `works` took."""
        return {
            "bytes_per_second": STREAM / found["stream"]["core"],
            "flop_per_second": self._flops / found["product"]["core"],
        }


def disk(directory: Path, repeats: int = 3) -> dict[str, float]:
    """Bytes a second of the clock: written and synced, and read in a row, page cache dropped."""
    path, content = directory / "disk", os.urandom(PIECE)
    written, read = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(FILE // PIECE):
                file.write(content)
            os.fsync(file.fileno())
        written.append(FILE / (time.perf_counter() - began))
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(PIECE):
                pass
            read.append(FILE / (time.perf_counter() - began))
        path.unlink()
    return {"disk_written": statistics.median(written), "disk_read": statistics.median(read)}


def read_from_disk() -> int:
    """Bytes that this process had the system read from a disk so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def resident() -> dict[str, float]:
    """Bytes of main memory that this process holds, and those that it shares with nobody, or its
    part of those it shares.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {"resident": 1024 * kilobytes["Rss"], "own_part": 1024 * kilobytes["Pss"]}


def middle(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number of alike measurements."""
    return {name: statistics.median(one[name] for one in of) for name in of[0]}
