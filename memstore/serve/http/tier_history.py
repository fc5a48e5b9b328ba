"""A time series of the tiers' counters: a sample every few seconds while the server runs."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from memstore.errors import MemstoreError
from memstore.store.memory_store import MemoryStore

EVERY = 5.0  # seconds
KEPT = 720  # samples: an hour


class TierHistory:
    """Counts by tier since the memory was opened (TierStats, "held" and "budget"), as they were at
    moments of the last hour.
    """

    def __init__(self, store: MemoryStore, *, every: float = EVERY, kept: int = KEPT) -> None:
        self._store, self.every = store, every
        self._samples: deque[dict[str, Any]] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self) -> dict[str, Any]:
        """Take one: {"time", "tiers"}."""
        taken = {"time": round(time.time(), 3), "tiers": self._store.tier_stats()}
        self._samples.append(taken)
        return taken

    def since(self, moment: float = 0.0) -> list[dict[str, Any]]:
        """The samples after a time (seconds since 1970), and how it is now as the last one."""
        if not self._samples or time.time() - self._samples[-1]["time"] >= self.every / 5:
            self.sample()
        return [taken for taken in self._samples if taken["time"] > moment]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Take samples within."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _keep(self) -> None:
        while True:
            with suppress(MemstoreError):  # one that cannot be read now is one sample less
                await asyncio.to_thread(self.sample)
            await asyncio.sleep(self.every)
