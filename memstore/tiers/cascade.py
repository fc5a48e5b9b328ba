"""The tiers of a memory as one: lookups go to the top, misses are read from below, every tier but
the disk is a cache, and worker threads bring predicted units up before a lookup asks for them.

    device (optional)  ->  host  ->  disk, or memstore.share for a published memory

The caches are inclusive: units of the device tier came through the host tier, which may have
evicted them since. A session's own blocks are pinned in the host tier until they are committed or
the session ends.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Unpack

from torch import Tensor

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.disk.reading import Batch, PlacedReader
from memstore.disk.tables.catalog import Catalog
from memstore.tiers.policy import DEFAULT_POLICY, HOST_BUDGET, Predictor, TierOptions
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Held, LowestTier, TierCounter, UnitShape

_WORKERS = 2  # threads that prefetch
_AT_ONCE = 32  # units that a worker reads at once
_MOST = 4096  # predicted units that may wait; beyond it the oldest are dropped


class Cascade:
    """A disk tier below a host tier and an optional device tier. Safe for several threads."""

    def __init__(
        self,
        disk: LowestTier,
        shape: UnitShape,
        *,
        computes: bool = False,
        **options: Unpack[TierOptions],
    ) -> None:
        """computes: whether sessions compute units that no tier has. options: checked. Raises
        BudgetExceeded, InvalidConfig.
        """
        policy = options.get("policy", DEFAULT_POLICY)
        self.disk = disk
        budget = options.get("host_budget", HOST_BUDGET)
        self.host = SlabTier("host", disk, budget, shape, policy=policy)
        self.device, device = None, options.get("device")
        if device is not None:
            budget = options.get("device_budget", HOST_BUDGET)
            place = usable_device(device)
            self.device = SlabTier("device", self.host, budget, shape, policy=policy, device=place)
        self.top = self.host if self.device is None else self.device
        self.predictor: Predictor = options.get("prefetch", "off")
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="memstore-prefetch")
        self._lock = threading.RLock()  # as in a slab tier, what an interrupt cannot leave taken
        self._waiting: dict[BlockKey, None] = {}  # predicted units, in the order of asking
        self._computes, self._computed = computes, TierCounter()

    def close(self) -> None:
        """Drop waiting predictions, and end all threads; idempotent."""
        if self._pid == os.getpid():  # a forked child has none of these threads
            with self._lock:
                self._waiting.clear()
            self._threads.shutdown()
        self.disk.close()

    # Reading

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Prefetch units that will probably be looked up soon; return at once the number of missing
        ones.

        A prediction is a hint. It is dropped if too many wait, if its unit is cached or being read,
        and if reading it fails (the lookup that needs the unit then raises the error). A lookup of
        a unit that is being prefetched waits for that read instead of repeating it
        (SlabTier.lease).
        """
        absent = [unit for unit in units if not self.top.holds(unit)]
        with self._lock:
            reads = -(-len(self._waiting) // _AT_ONCE)  # so many were asked for and have not begun
            self._waiting.update(dict.fromkeys(absent))
            for _ in range(len(self._waiting) - _MOST):
                del self._waiting[next(iter(self._waiting))]
            needed = -(-len(self._waiting) // _AT_ONCE)
        with suppress(RuntimeError):  # no more threads, or closed: fewer are read ahead, or none
            for _ in range(needed - reads):
                self._threads.submit(self._read_ahead)
        return len(absent)

    def _read_ahead(self) -> None:
        with self._lock:
            units = [unit for unit, _ in zip(self._waiting, range(_AT_ONCE))]
            for unit in units:
                del self._waiting[unit]
        # whatever it is, a lookup that needs one of them meets it again, and raises it
        with suppress(Exception):
            self.top.prefetch(units)

    # Units of sessions

    def count_computed(self, size: int, seconds: float) -> None:
        """Count a unit of `size` bytes that a session computed in `seconds`, as a hit of the tier
        "computed", below all others.
        """
        self._computed.count(hits=1, bytes=size, seconds=seconds)

    def drop(self, units: Sequence[BlockKey]) -> None:
        """Drop units from all caches."""
        for tier in reversed(self.caches):  # a lookup in between would bring them up from below
            tier.drop(units)

    def drop_document(self, document: int) -> None:
        """Drop a document from all caches."""
        for tier in reversed(self.caches):  # as in drop
            tier.drop_document(document)

    # Counting

    @property
    def caches(self) -> list[SlabTier]:
        """The tiers above the disk, top first."""
        return [self.host] if self.device is None else [self.device, self.host]

    def stats(self) -> dict[str, dict[str, int | float]]:
        """The counts of each tier, top first, and what the caches hold."""
        tiers: dict[str, dict[str, int | float]] = {
            tier.name: {**vars(tier.stats()), "held": tier.bytes, "budget": tier.budget_bytes}
            for tier in self.caches
        }
        for name, counter in self.disk.counters.items():
            tiers[name] = dict(vars(counter.stats))
            if failures := counter.failures:
                tiers[name]["failed"] = sum(failures.values())
                tiers[name] |= {f"failed_{reason}": n for reason, n in failures.items()}
        if self._computes:
            tiers["computed"] = dict(vars(self._computed.stats))
        return tiers


class DiskTier:
    """The lowest tier of a directory: records of its database, read in batches from their positions
    in the file.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.database = catalog.database
        self.counters = {"disk": TierCounter()}
        self._catalog = catalog
        self._placed = PlacedReader(self.database.path, catalog.blocks)

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from, in one read transaction, in the order of the records' keys."""
        if not units:
            return [], []
        started = time.perf_counter()
        batch = Batch(units, raw_view(slab), slots, self._catalog.blocks)
        with self.database.read() as txn:
            writes = {number: self._catalog.write_of(txn, number) for number in batch.documents}
            self._placed.read(txn, batch, batch.by_record(writes))
        size, seconds = batch.bytes_of(range(len(units))), time.perf_counter() - started
        self.counters["disk"].count(hits=len(units), bytes=size, seconds=seconds)
        return batch.lengths, ["disk"] * len(units)

    def close(self) -> None:
        """End its threads."""
        self._placed.close()
