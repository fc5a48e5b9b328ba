"""A tier below that is slow or fails: a UnitSource around another, for tests and benchmarks of what
stands above it.
"""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.tiers.lease import UnitSource


class SlowSource:
    """Takes `seconds` longer for every record that a call reads; other threads run meanwhile."""

    def __init__(self, source: UnitSource, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        time.sleep(self.seconds * len({(unit.document, unit.layer, unit.block) for unit in units}))
        return self.source.read(units, slab, slots)


class FailingSource:
    """Raises error() at the calls that `fails` picks, by their number from 0 on and their units; it
    may have filled some of the slots by then.
    """

    def __init__(
        self,
        source: UnitSource,
        error: Callable[[], Exception],
        fails: Callable[[int, Sequence[BlockKey]], bool] = lambda call, units: True,
    ) -> None:
        self.source, self.error, self.fails = source, error, fails
        self._calls = 0
        self._lock = threading.Lock()

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        with self._lock:
            call, self._calls = self._calls, self._calls + 1
        if self.fails(call, units):
            half = len(units) // 2
            self.source.read(units[:half], slab, slots[:half])
            raise self.error()
        return self.source.read(units, slab, slots)
