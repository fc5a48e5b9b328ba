"""A tier of equal slots in one slab, cached over a source below: the host tier in main memory,
which attention on the CPU reads, or a device tier, which is filled from the host tier.

A byte budget is never exceeded. Cached units come from the source and are evicted by the policy;
leased units stay until the lease ends; pinned units stay until they are unpinned or dropped.

A tier is unusable in a forked child: threads of the parent may have held its lock.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, MemoryClosed
from memstore.kernels.slab_copy import load_units
from memstore.tiers.slots import Held, Lease, Slots, SlotTable, Source, TierStats, UnitShape


class SlabTier:
    """Slots for units; missing units are read from below.

    slab, k, v, lengths: of Slots, as many as the budget allows. Safe for several threads. The
    number of slots of a unit is known after it was read: until then it has as many as the longest
    unit needs.

    On a device, any thread may refill a slot as soon as its lease is released. The copy waits for
    earlier work on the filling thread's current stream, so every thread must read slots on the
    device's default stream.
    """

    patience = 60.0  # seconds that a lookup waits for slots which other threads use

    def __init__(
        self,
        name: str,
        source: Source,
        budget_bytes: int,
        shape: UnitShape,
        *,
        policy: str = "lru",
        device: torch.device | str = "cpu",
    ) -> None:
        """source: what misses are read from. policy: see memstore.tiers.policy. device: where the
        slots are.

        Raises BudgetExceeded if not even one unit fits or the machine refuses the memory,
        InvalidConfig.
        """
        self.name, self.source = name, source
        self.budget_bytes, self.slot_bytes, self._shape = budget_bytes, shape.slot_bytes, shape
        slots = budget_bytes // shape.slot_bytes
        self.capacity = slots // shape.most_slots  # units of any length
        if self.capacity < 1:
            raise BudgetExceeded(
                f"a {self.name} budget of {budget_bytes} bytes holds no block; "
                f"one takes {shape.most_slots * shape.slot_bytes} bytes, so raise the budget"
            )
        try:
            self._memory = Slots(slots, shape, torch.device(device))
        except (RuntimeError, MemoryError) as error:  # torch has no error of its own for this
            raise BudgetExceeded(
                f"the machine refuses a {self.name} budget of {budget_bytes} bytes; lower the "
                "budget"
            ) from error
        self.slab, self.k, self.v = self._memory.slab, self._memory.k, self._memory.v
        self.lengths = self._memory.lengths
        self._table = SlotTable(slots, policy)
        # a lock of C: an interrupt just after taking a condition of Python would keep it
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # thread -> leases that it took and that are not released
        self._lessees: dict[int, int] = {}
        # units that some thread is reading right now -> their slots
        self._arriving: dict[BlockKey, Held] = {}
        self._predicted: set[BlockKey] = set()  # of these, what is prefetched
        self._ahead = 0  # slots that prefetches are reading into
        self._short = 0  # threads that wait for slots
        self._pid = os.getpid()

    def lease(self, units: Sequence[BlockKey]) -> Lease:
        """Slots that hold these units until the lease is released; missing units are read from
        below. Repeats are allowed.

        If prefetches or other threads' leases leave too little room, the call waits for them to
        end, for other threads' leases only if this thread has none: so no two threads wait for each
        other.

        Raises BudgetExceeded if the units do not fit in addition to pinned and leased ones (its
        `fits` is how many would); and what the source raises: CorruptBlock, DocumentNotFound.
        """
        self._check_process()
        thread, until, waited = threading.get_ident(), 0.0, 0.0
        arriving: dict[BlockKey, Held] = {}
        with self._lock:
            while True:
                waited += self._join(units) if self._arriving else 0.0
                held = cast(list[Held], list(map(self._table.slots.get, units)))
                if None not in held:
                    self._table.hold(chain.from_iterable(held))
                    self._table.hit(units)
                    break
                absent = [unit for unit, slots in zip(units, held) if slots is None]
                missing, most = list(dict.fromkeys(absent)), self._shape.most_slots
                found = [slots for slots in held if slots is not None]
                self._table.hold(chain.from_iterable(found))
                room = self._table.room()
                if len(missing) * most <= room:
                    self._table.hit(unit for unit in units if unit in self._table.slots)
                    taken = self._table.take(missing, [most] * len(missing))
                    arriving = dict(zip(missing, taken))
                    self._arriving.update(arriving)
                    self._table.hold(chain.from_iterable(arriving[unit] for unit in absent))
                    held = [slots or arriving[unit] for unit, slots in zip(units, held)]
                    break
                self._table.unlease(chain.from_iterable(found))
                began = time.perf_counter()
                until = until or began + self.patience
                cached = [unit for unit in {*units} - {*missing} if unit not in self._table.pinned]
                used = sum(len(self._table.slots[unit]) for unit in cached)
                if not self._wait_for_room(len(missing) * most, room, used, thread, until):
                    fits = room // most + len({*units} - {*missing})
                    raise BudgetExceeded(
                        f"{len({*units})} blocks are needed at once and the {self.name} tier has "
                        f"room for {fits} ({self.capacity} in all); raise the {self.name} budget "
                        "or read with fewer blocks a step",
                        fits,
                    )
                waited += time.perf_counter() - began
            self._lessees[thread] = self._lessees.get(thread, 0) + 1
            size = self.slot_bytes * sum(map(len, held))
            self._table.counts.add_lookup(len(units), len(arriving), waited, size)
        fetched: dict[int, str] = {}
        if arriving:
            tiers = self._fetch(arriving, [*chain.from_iterable(held)], thread)
            fetched = {slot: tier for some, tier in zip(arriving.values(), tiers) for slot in some}
            held = [arriving.get(unit, slots) for unit, slots in zip(units, held)]
        lease = Lease(
            held,
            self.name,
            fetched,
            self.slab,
            self._memory.lengths_here,
            lambda: self._release(lease.held, thread),
        )
        return lease

    def prefetch(self, units: Iterable[BlockKey]) -> int:
        """Read units that will probably be looked up into slots that are not needed now; return the
        number of units read.

        Units that are cached or being read, and units without room, are skipped: a prefetch never
        exceeds the budget. Raises what the source raises, and then none of them is cached.
        """
        with self._lock:
            wanted = [
                u
                for u in dict.fromkeys(units)
                if u not in self._table.slots and u not in self._arriving
            ]
            # nothing while lookups wait for room
            size = self._shape.most_slots
            wanted = wanted[: 0 if self._short else self._table.room() // size]
            missing = dict(zip(wanted, self._table.take(wanted, [size] * len(wanted))))
            held = [*chain.from_iterable(missing.values())]
            self._table.hold(held)
            self._ahead += len(held)
            self._arriving.update(missing)
            self._predicted.update(missing)
        if missing:
            self._fetch(missing, held)
        return len(missing)

    def admit(self, unit: BlockKey, k: Tensor, v: Tensor, length: int) -> None:
        """Cache a unit of `length` valid content tokens that was computed instead of being read
        from below; it counts as missed. Without room it is not cached.

        k, v: [block_size, D], zero from `length` on.
        """
        with self._lock:
            size = self._shape.slots_of(length)
            self._table.counts.add_lookup(1, 1, 0.0, size * self.slot_bytes)
            here = unit in self._table.slots or unit in self._arriving
            if here or self._short or self._table.room() < size:
                return
            taken = self._table.take([unit], [size])
            self._write(taken, k[None], v[None], [length])
            self._table.slots[unit] = taken[0]
            self._changed.notify_all()

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As Source.read_from, into the slab of a tier above: copy units in groups that fit here.
        Raises BudgetExceeded if not even one unit fits, and what `lease` raises.
        """
        lengths: list[int] = []
        tiers: list[str] = []
        group = max(1, self.capacity // 2)
        while len(lengths) < len(units):
            start = len(lengths)
            end = min(start + group, len(units))
            try:
                lease = self.lease(units[start:end])
            except BudgetExceeded:
                if end - start == 1:
                    raise
                group = (end - start) // 2  # much is pinned
                continue
            there = [
                slot
                for held, some in zip(lease.of_units, slots[start:end])
                for slot in some[: len(held)]
            ]
            with lease:  # until the copy is done: after that others may write over these slots
                loaded = load_units(self.slab, slab, lease.held, there)
                if loaded is not None:
                    loaded.synchronize()
                lengths += lease.lengths.tolist()
                tiers += lease.tiers
        return lengths, tiers

    # Pinned units

    def pin(
        self,
        document: int,
        layer: int,
        first_block: int,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
    ) -> list[BlockKey]:
        """Hold blocks first_block .. of a document as pinned units, in one copy; return the units,
        block by block.

        k, v: [n, Hkv, block_size, D]. lengths: valid content tokens of each block (None: all blocks
        are full). The units must be new. Raises BudgetExceeded (and holds none of them) if they do
        not fit.
        """
        n, heads, block_size, _ = k.shape
        units = [
            BlockKey(document, layer, block, head)
            for block, head in product(range(first_block, first_block + n), range(heads))
        ]
        of_blocks = [block_size] * n if lengths is None else lengths
        of_units = [length for length in of_blocks for _ in range(heads)]
        sizes = [self._shape.slots_of(length) for length in of_units]
        needed = sum(sizes)
        self._check_process()
        thread, until = threading.get_ident(), time.perf_counter() + self.patience
        with self._lock:
            while (room := self._table.room()) < needed:
                if self._wait_for_room(needed, room, 0, thread, until):
                    continue
                raise BudgetExceeded(
                    f"the {self.name} tier of {self._table.capacity * self.slot_bytes} bytes has "
                    f"no room for {len(units)} more blocks of a running session; raise the "
                    f"{self.name} budget"
                )
            taken = self._table.take(units, sizes, cached=False)
            self._write(taken, k.flatten(0, 1), v.flatten(0, 1), of_units)
            for unit, held in zip(units, taken):
                self._table.pin(unit, held)
        return units

    def unpin(self, units: Iterable[BlockKey]) -> None:
        """Cache pinned units like any other: the source below has them now."""
        with self._lock:
            for unit in units:
                if unit in self._table.pinned:
                    self._table.unpin(unit)
                    self._table.policy.insert(unit, full=False, blocked=self._table.blocked)
            self._changed.notify_all()

    def drop(self, units: Iterable[BlockKey]) -> None:
        """Drop units, pinned or not, also those being read. A lease on one keeps its slot unchanged
        until the lease ends.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            for unit in units:
                held = self._table.slots.get(unit) or self._arriving.pop(unit, None)
                unused = unit in self._table.untouched or unit in self._predicted
                if held is None:
                    continue
                if unit in self._table.pinned:
                    self._table.unpin(unit)
                else:
                    self._table.policy.drop(unit)
                self._table.slots.pop(unit, None)
                if unused:
                    self._table.untouched.discard(unit)
                    self._predicted.discard(unit)
                    self._table.counts.unused += 1
                for slot in held:
                    self._table.vacate(slot)
            self._changed.notify_all()

    def drop_document(self, document: int) -> None:
        """Drop all units of a document, also those being read, without waiting."""
        with self._lock:
            held = [*self._table.slots, *self._arriving]
            self.drop([unit for unit in held if unit.document == document])

    # Counting

    @property
    def bytes(self) -> int:
        """Bytes of slots in use; at most the budget."""
        with self._lock:
            return (len(self._table.units) + len(self._table.orphans)) * self.slot_bytes

    def holds(self, unit: BlockKey) -> bool:
        """Whether the unit is cached; not counted as a lookup."""
        self._check_process()
        with self._lock:
            return unit in self._table.slots

    def stats(self) -> TierStats:
        """Lookups so far."""
        with self._lock:
            return replace(self._table.counts)

    # Inside

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise MemoryClosed(
                f"the {self.name} tier belongs to process {self._pid}, not to this fork of it; "
                "start processes with spawn"
            )

    def _wait_for_room(
        self, needed: int, room: int, cached: int, thread: int, until: float
    ) -> bool:
        """Wait for an event that may make room; False if waiting cannot help, or has lasted too
        long.

        needed, room: slots; cached: slots of cached units that are needed, too.
        """
        later = room + self._ahead
        # no thread waits for this one, so it may wait for all others
        if not self._lessees.get(thread):
            later = self._table.capacity - self._table.pinned_slots - cached
        patience = until - time.perf_counter()
        if needed > later or patience <= 0:
            return False
        self._short += 1
        try:
            self._changed.wait(patience)
        finally:
            self._short -= 1
        return True

    def _join(self, units: Sequence[BlockKey]) -> float:
        """Wait until no other thread is reading one of these units; return the seconds waited."""
        began = 0.0
        while not self._arriving.keys().isdisjoint(units):
            began = began or time.perf_counter()
            late = self._predicted.intersection(units)
            self._changed.wait()
            for unit in late & self._table.untouched:
                self._table.untouched.remove(unit)
                self._table.counts.late += 1
        return time.perf_counter() - began if began else 0.0

    def _write(self, taken: Sequence[Held], k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
        """Fill slots with units of so many tokens, k, v [n, block_size, D]."""
        size = self._shape.slot_size
        for half, x in ((self.k, k), (self.v, v)):
            if self._shape.most_slots == 1:
                half[_consecutive([held[0] for held in taken])] = x
                continue
            for held, one in zip(taken, x):
                some = pad(one, (0, 0, 0, max(0, len(held) * size - len(one))))
                half[list(held)] = some[: len(held) * size].view(len(held), size, -1)
        self._memory.note_units(zip(taken, lengths))

    def _fetch(
        self, missing: dict[BlockKey, Held], held: Sequence[int], thread: int | None = None
    ) -> list[str]:
        """Read units from below into their slots, outside the lock; return the tier that had each.
        After an error nothing of this lease remains. Unneeded slots are freed, and `missing` gets
        the remaining ones.

        thread: the owner of the lease; None for a prefetch, which has a lease only while it reads.
        A unit that is dropped while it is read is not cached, but a lease on it stays valid.
        """
        began = time.perf_counter()
        lengths: list[int] | None = None
        ahead = sum(map(len, missing.values()))
        try:
            lengths, tiers = self.source.read_from(list(missing), self.slab, list(missing.values()))
        finally:
            with self._lock:
                wanted = {
                    unit: slots
                    for unit, slots in missing.items()
                    if self._arriving.get(unit) == slots
                }
                for unit in wanted:
                    del self._arriving[unit]
                if lengths is not None:
                    self._memory.note_units(zip(missing.values(), lengths))
                    for unit, length in zip(list(missing), lengths):
                        slots, size = missing[unit], self._shape.slots_of(length)
                        if unit in wanted and size < len(slots):
                            missing[unit] = self._table.trim(slots, size)
                            if thread is not None:
                                self._table.counts.bytes -= (len(slots) - size) * self.slot_bytes
                    self._table.slots.update((unit, missing[unit]) for unit in wanted)
                else:
                    for unit, slots in wanted.items():
                        self._table.policy.drop(unit)
                        for slot in slots:
                            self._table.vacate(slot)
                if thread is not None:
                    self._table.counts.seconds += time.perf_counter() - began
                else:
                    self._ahead -= ahead
                    self._predicted.difference_update(wanted)
                    if lengths is not None:
                        self._table.untouched.update(wanted)
                if thread is None:
                    self._release(chain.from_iterable(missing.values()), thread)
                elif lengths is None:
                    self._release(held, thread)
                self._changed.notify_all()
        return tiers

    def _release(self, held: Iterable[int], thread: int | None) -> None:
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


def _consecutive(slots: list[int]) -> slice | list[int]:
    """Slots as a slice if they are consecutive, which is faster to write."""
    if slots and slots[-1] - slots[0] == len(slots) - 1:
        return slice(slots[0], slots[-1] + 1)
    return slots
