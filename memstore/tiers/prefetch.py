"""The prefetcher: worker threads that bring predicted units up before a lookup asks for them.

A prediction is a hint. It is dropped when too many wait, when its unit is there or on its way
already, and when reading it fails (the lookup that really needs the unit then meets the error, with
its name). A lookup that comes while its unit is on the way waits for that read instead of repeating
it (SlabTier.lease).
"""

import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from memstore.block import BlockKey
from memstore.tiers.slab import SlabTier


@dataclass
class PrefetchStats:
    """Units since the prefetcher was made; TierStats counts which of them were used."""

    requested: int = 0  # predicted, repeats of what waits already left out
    held: int = 0  # of those, there or on their way when their turn came, or without room
    dropped: int = 0  # given up because too many waited, or cancelled
    read: int = 0  # read from below
    failed: int = 0  # lost to an error below

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class Prefetcher:
    """Reads predicted units into a tier on worker threads. Its threads start with the first request
    and end at `close`.

    Safe for several threads.
    """

    def __init__(
        self, tier: SlabTier, *, workers: int = 2, batch: int = 32, most: int = 4096
    ) -> None:
        """batch: units read at once by one worker. most: units that may wait; beyond it the oldest
        are dropped.
        """
        self.tier = tier
        self._workers, self._batch, self._most = workers, batch, most
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # as in a slab tier, what an interrupt cannot leave taken
        self._wake = threading.Condition(self._lock)
        self._waiting: dict[BlockKey, None] = {}  # in the order of asking
        self._threads: list[threading.Thread] = []
        self._busy = 0  # workers that are reading
        self.stats = PrefetchStats()

    def request(self, units: Iterable[BlockKey]) -> None:
        """Units that a lookup will probably want soon; returns at once, and raises nothing."""
        with self._lock:
            if self._closed:
                return
            before = len(self._waiting)
            self._waiting.update(dict.fromkeys(units))
            new = len(self._waiting) - before
            self.stats.requested += new
            for _ in range(len(self._waiting) - self._most):
                del self._waiting[next(iter(self._waiting))]
                self.stats.dropped += 1
            if not new:
                return
            if not self._threads:
                self._start()
            self._wake.notify_all()  # not only workers wait here

    def _start(self) -> None:
        for n in range(self._workers):
            thread = threading.Thread(target=self._work, name=f"memstore-prefetch-{n}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads: fewer read ahead, or none
                break
            self._threads.append(thread)
        if not self._threads:
            self.stats.dropped += len(self._waiting)
            self._waiting.clear()

    def cancel(self) -> None:
        """Forget what waits; reads under way come to their end."""
        with self._lock:
            self.stats.dropped += len(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()

    def drain(self) -> None:
        """Wait until nothing waits and nothing is being read."""
        with self._lock:
            while self._waiting or self._busy:
                self._wake.wait()

    def close(self) -> None:
        """Cancel, and wait for the reads under way; idempotent."""
        if self._pid != os.getpid():  # a forked child has none of these threads
            return
        with self._lock:
            self._closed = True
            self.stats.dropped += len(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                units = [unit for unit, _ in zip(self._waiting, range(self._batch))]
                for unit in units:
                    del self._waiting[unit]
                self._busy += 1
            read = failed = 0
            try:
                read = self.tier.prefetch(units)
            # whatever it is, a lookup that needs one of them meets it again, and raises it
            except Exception:
                failed = len(units)
            finally:
                with self._lock:
                    self._busy -= 1
                    self.stats.read += read
                    self.stats.failed += failed
                    self.stats.held += len(units) - read - failed
                    self._wake.notify_all()
