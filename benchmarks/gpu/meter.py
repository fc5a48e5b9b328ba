"""Timing on a device, and its rates, measured in the same run, that times are compared with."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
ENOUGH = 3.0  # seconds of timed repeats, after which no more are taken
_FLUSHES = 16  # a millisecond of an H200: Python launches what is timed meanwhile


class Meter:
    """Medians of work on a device, between CUDA events there and by the clock on a CPU, and the
    device's rates: `stream` bytes a second of a sum, `products` operations a second of half
    precision, `load` bytes a second from (page-locked) main memory.

    small: of arrays so small that the rates say nothing, for tests.
    """

    def __init__(
        self, repeats: int, device: torch.device | str = "cuda", *, small: bool = False
    ) -> None:
        self.place, self.repeats = torch.device(device), repeats
        self._warm_up = 0 if small else WARM_UP
        self.cuda = self.place.type == "cuda"
        numbers, side = (1 << 12, 32) if small else (1 << 28, 8192) if self.cuda else (1 << 24, 512)
        self.dtype = torch.float16 if self.cuda else torch.float32
        self._flush = torch.empty(numbers, dtype=torch.int8, device=self.place)
        large = torch.randn(numbers, device=self.place)
        self.stream = large.nbytes / self.seconds(large.sum)
        del large
        a, b = (torch.randn(side, side, device=self.place).to(self.dtype) for _ in range(2))
        self.products = 2 * side**3 / self.seconds(lambda: a @ b)
        host = self.host(numbers, dtype=torch.int8)
        self.load = host.nbytes / self.seconds(lambda: self._flush.copy_(host, non_blocking=True))

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An array in main memory, page-locked where a CUDA device copies from it; written once."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.cuda)

    def seconds(self, work: Callable[[], Any], *, flush: bool = True) -> float:
        """Median seconds of work on the device. The second-level cache is flushed before, which
        also keeps the device busy while Python launches what is timed.
        """

        def once() -> float:
            return self._on_device(work, flush) if self.cuda else _by_clock(work)

        if self._warm_up:
            once()  # compiles, perhaps
        for _ in range(self._warm_up - 1):
            if once() > ENOUGH / 2:
                break
        times: list[float] = []
        while len(times) < self.repeats and sum(times) < ENOUGH:
            times.append(once())
        return statistics.median(times)

    def _on_device(self, work: Callable[[], Any], flush: bool) -> float:
        for _ in range(_FLUSHES if flush else 0):
            self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def called(self, work: Callable[[], Any], calls: int = 50) -> float:
        """Seconds a call, of calls in a row. On a fast device this is the time of Python and the
        launches.
        """
        if self._warm_up:
            work()
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return (time.perf_counter() - began) / calls

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.cuda:
            torch.cuda.synchronize(self.place)

    def floor(self, size: float, operations: float = 0, *, up: bool = False) -> float:
        """The least seconds for `size` bytes and for operations of half precision.

        up: the bytes come from main memory.
        """
        return max(size / (self.load if up else self.stream), operations / self.products)


def _by_clock(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
