"""A disk whose speed is known."""

import heapq
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.tiers.lease import UnitSource


class SlowSource:
    """A source whose records take a fixed time each, `parallel` of them at once, first come, first
    served.
    """

    def __init__(self, source: UnitSource, seconds: float, parallel: int) -> None:
        self._source, self._seconds = source, seconds
        self._free = [0.0] * parallel  # when each of the places is free again
        self._lock = threading.Lock()
        self.records = 0

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """As the source, once the last of its records would have come."""
        records = len({unit[:3] for unit in units})
        with self._lock:
            done = now = time.perf_counter()
            for _ in range(records):
                done = max(now, self._free[0]) + self._seconds
                heapq.heapreplace(self._free, done)
            self.records += records
        time.sleep(max(0.0, done - now))
        return self._source.read(units, slab, slots)


def slowed(memory: MemoryStore, seconds: float, parallel: int) -> None:
    """Have an open memory read its misses through a SlowSource."""
    host = memory.tiers.host  # no caller but a benchmark wants this
    host.source = SlowSource(host.source, seconds, parallel)
