"""The prefetcher: worker threads that bring predicted units up before a lookup asks for them.

A prediction is a hint. It is dropped when too many wait, when its unit is there or on its way
already, and when reading it fails (the lookup that really needs the unit then meets the error, with
its name). A lookup that comes while its unit is on the way waits for that read instead of repeating
it (SlabTier.lease).
"""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from memstore.block import BlockKey
from memstore.tiers.slab import SlabTier


class Prefetcher:
    """Reads predicted units into a tier on worker threads, until it is closed. Safe for several
    threads.
    """

    def __init__(
        self, tier: SlabTier, *, workers: int = 2, batch: int = 32, most: int = 4096
    ) -> None:
        """batch: units read at once by one worker. most: units that may wait; beyond it the oldest
        are dropped.
        """
        self.tier = tier
        self._workers, self._batch, self._most = workers, batch, most
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="memstore-prefetch")
        self._pid = os.getpid()
        self._lock = threading.RLock()  # as in a slab tier, what an interrupt cannot leave taken
        self._ended = threading.Condition(self._lock)
        self._waiting: dict[BlockKey, None] = {}  # in the order of asking
        self._busy = 0  # workers

    def request(self, units: Iterable[BlockKey]) -> None:
        """Units that a lookup will probably want soon; returns at once, and raises nothing."""
        with self._lock:
            self._waiting.update(dict.fromkeys(units))
            for _ in range(len(self._waiting) - self._most):
                del self._waiting[next(iter(self._waiting))]
            needed = -(-len(self._waiting) // self._batch)
            # no more threads, or closed: fewer read ahead, or none
            with suppress(RuntimeError):
                for _ in range(min(needed, self._workers - self._busy)):
                    self._threads.submit(self._work)
                    self._busy += 1
            if not self._busy:
                self._waiting.clear()

    def cancel(self) -> None:
        """Forget what waits; reads under way come to their end."""
        with self._lock:
            self._waiting.clear()

    def drain(self) -> None:
        """Wait until nothing waits and nothing is being read."""
        with self._lock:
            while self._busy:
                self._ended.wait()

    def close(self) -> None:
        """Cancel, and wait for the reads under way; idempotent."""
        if self._pid == os.getpid():  # a forked child has none of these threads
            self.cancel()
            self._threads.shutdown()

    def _work(self) -> None:
        while units := self._next():
            # whatever it is, a lookup that needs one of them meets it again, and raises it
            with suppress(Exception):
                self.tier.prefetch(units)

    def _next(self) -> list[BlockKey]:
        """The units that a worker reads next; none where it ends."""
        with self._lock:
            units = [unit for unit, _ in zip(self._waiting, range(self._batch))]
            for unit in units:
                del self._waiting[unit]
            if not units:  # 0: of a thread that could not be started when it was asked for
                self._busy = max(0, self._busy - 1)
                self._ended.notify_all()
            return units
