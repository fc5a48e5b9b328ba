"""A tier of equal slots in one slab, cached over a source below: what the host and the device tier
have in common.

A byte budget is never exceeded. Cached units come from the source and are evicted as the policy
says; leased units stay until the lease ends; pinned units stay until they are unpinned or dropped.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.tiers.held_units import HeldUnits
from memstore.tiers.lease import Lease
from memstore.tiers.stats import LATE, SECONDS

_NONE: Mapping[int, str] = {}  # what a lease of units that are all here had to fetch


class SlabTier(HeldUnits):
    """Slots for units, read from below where they are not held.

    slab, k, v, lengths: of Slots, as many as the budget admits. Safe for several threads.
    """

    def lease(self, units: Sequence[BlockKey]) -> Lease:
        """Slots that hold these units until the lease is released; what is missing is read from
        below. Repeats are allowed.

        Where prefetches or other threads' leases leave too little room, it waits for them to end,
        for other threads' leases only if this thread has none itself: so no two threads wait for
        each other.

        Raises BudgetExceeded if the units do not fit beside what is pinned and leased (its `fits`
        is how many would); and what the source raises: CorruptBlock, DocumentNotFound.
        """
        thread = threading.get_ident()
        with self._lock:
            until = waited = 0.0
            missing: dict[BlockKey, int] = {}
            while True:
                waited += self._join(units) if self._arriving else 0.0
                slots = list(map(self._table.slots.get, units))
                if None not in slots:
                    held = cast(list[int], slots)
                    self._table.hold(held)
                    self._table.hit(units)
                    break
                began = time.perf_counter()
                until = until or began + self.patience
                made = self._make_room(units, slots, thread, until)
                if made is not None:
                    missing, held = made
                    break
                waited += time.perf_counter() - began
            self._lessees[thread] = self._lessees.get(thread, 0) + 1
            self._table.counts.lookups(units, missing, waited, self.unit_bytes)
        fetched = _NONE
        if missing:
            fetched = dict(zip(missing.values(), self._fetch(missing, held, thread)))
        return Lease(
            held,
            self.name,
            fetched,
            self.k,
            self.v,
            self._memory.lengths_here,
            lambda: self._release(held, thread),
        )

    def prefetch(self, units: Iterable[BlockKey]) -> int:
        """Read units that will probably be looked up into slots that nobody needs now; return how
        many were read.

        Units that are held or on their way are passed over, and what does not fit as well: a
        prefetch is never an error of the budget. Raises what the source raises, and then none of
        them is held.
        """
        with self._lock:
            wanted = [
                u
                for u in dict.fromkeys(units)
                if u not in self._table.slots and u not in self._arriving
            ]
            # nothing while lookups wait for room
            wanted = wanted[: 0 if self._short else self._table.room()]
            missing = dict(zip(wanted, self._table.take(wanted)))
            held = list(missing.values())
            self._table.hold(held)
            self._ahead += len(held)
            self._arriving.update(missing)
            self._predicted.update(missing)
        if missing:
            self._fetch(missing, held)
        return len(missing)

    def _join(self, units: Sequence[BlockKey]) -> float:
        """Wait until no unit is on its way in another thread; return the seconds that took."""
        began = 0.0
        while not self._arriving.keys().isdisjoint(units):
            began = began or time.perf_counter()
            late = self._predicted.intersection(units)
            self._changed.wait()
            for unit in late & self._table.untouched:
                self._table.untouched.remove(unit)
                self._table.counts.of(unit.layer)[LATE] += 1
        return time.perf_counter() - began if began else 0.0

    def _make_room(
        self, units: Sequence[BlockKey], slots: Sequence[int | None], thread: int, until: float
    ) -> tuple[dict[BlockKey, int], list[int]] | None:
        """Slots for the distinct units that are not held, marked as arriving; and the slot of every
        unit, leased.

        None after a wait for room: what is held may have changed.
        """
        missing = list(dict.fromkeys(unit for unit, slot in zip(units, slots) if slot is None))
        found = [slot for slot in slots if slot is not None]
        self._table.hold(found)
        room = self._table.room()
        if len(missing) > room:
            self._table.unlease(found)
            found_cached = sum(
                self._table.units[slot] not in self._table.pinned for slot in set(found)
            )
            if self._wait_for_room(len(missing), room, found_cached, thread, until):
                return None
            fits = room + len(set(found))
            raise BudgetExceeded(
                f"{len(set(units))} blocks are needed at once and the {self.name} tier has room "
                f"for {fits} "
                f"({self.capacity} in all); raise the {self.name} budget or read with fewer blocks "
                "a step",
                fits,
            )
        self._table.hit([unit for unit, slot in zip(units, slots) if slot is not None])
        arriving = dict(zip(missing, self._table.take(missing)))
        self._arriving.update(arriving)
        self._table.hold([arriving[unit] for unit, slot in zip(units, slots) if slot is None])
        return arriving, [
            arriving[unit] if slot is None else slot for unit, slot in zip(units, slots)
        ]

    def _fetch(
        self, missing: dict[BlockKey, int], held: Sequence[int], thread: int | None = None
    ) -> list[str]:
        """Read units from below into their slots, outside the lock, and return the tier that had
        each; on failure nothing of this lease remains.

        thread: whose lease it is, or None for a prefetch, which has one only while it reads. A unit
        that is dropped meanwhile is not held afterwards, though a lease on it stays good.
        """
        began = time.perf_counter()
        lengths: list[int] | None = None
        slots = list(missing.values())
        try:
            lengths, tiers = self._read_below(list(missing), slots)
        finally:
            with self._lock:
                wanted = {
                    unit: slot for unit, slot in missing.items() if self._arriving.get(unit) == slot
                }
                for unit in wanted:
                    del self._arriving[unit]
                if lengths is not None:
                    self._memory.note_lengths(slots, lengths)
                    self._table.slots.update(wanted)
                else:
                    for unit, slot in wanted.items():
                        self._table.policy.drop(unit)
                        self._table.vacate(slot)
                if thread is not None:
                    self._table.counts.of(next(iter(missing)).layer)[SECONDS] += (
                        time.perf_counter() - began
                    )
                else:
                    self._ahead -= len(slots)
                    self._predicted.difference_update(wanted)
                    if lengths is not None:
                        self._table.untouched.update(wanted)
                if thread is None or lengths is None:
                    self._release(held, thread)
                self._changed.notify_all()
        return tiers

    def _read_below(
        self, units: Sequence[BlockKey], slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """Fill slots with units; of each its length and the name of the tier that had it."""
        raise NotImplementedError

    def _release(self, held: Sequence[int], thread: int | None) -> None:
        with self._lock:
            self._table.unlease(held)
            if thread is not None:
                left = self._lessees[thread] - 1
                if left:
                    self._lessees[thread] = left
                else:
                    del self._lessees[thread]
            if self._short:
                self._changed.notify_all()
