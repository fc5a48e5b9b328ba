"""A tier of equal slots in one slab, cached over a source below: what the host and the device tier
have in common.

A byte budget is never exceeded. Cached units come from the source and are evicted as the policy
says; leased units stay until the lease ends; pinned units stay until they are unpinned or dropped.

A forked child has none of its parent's other threads: a lock that one of them held could never be
released there, and what one was reading never arrives. So a fork waits for the locks of all tiers,
which are held briefly, and the child forgets what was under way.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import cast

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.tiers.slots import Lease, Slots, SlotTable, UnitShape
from memstore.tiers.stats import TierStats

_NONE: Mapping[int, str] = {}  # what a lease of units that are all here had to fetch
_all: "weakref.WeakSet[SlabTier]" = weakref.WeakSet()
_forking = threading.RLock()
_locked: list["SlabTier"] = []


class SlabTier:
    """Slots for units, read from below where they are not held.

    slab, k, v, lengths: of Slots, as many as the budget admits. Safe for several threads.
    """

    name = "slab"
    patience = 60.0  # seconds that a lookup waits for slots which other threads use

    def __init__(
        self,
        budget_bytes: int,
        shape: UnitShape,
        *,
        policy: str = "lru",
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """policy: see memstore.tiers.policy. device, pin_memory: see Slots.

        Raises BudgetExceeded if not even one unit fits or the machine refuses the memory,
        InvalidConfig.
        """
        self.budget_bytes, self.unit_bytes = budget_bytes, shape.bytes
        self.capacity = budget_bytes // shape.bytes
        if self.capacity < 1:
            raise BudgetExceeded(
                f"a {self.name} budget of {budget_bytes} bytes holds no block; "
                f"one takes {shape.bytes} bytes, so raise the budget"
            )
        try:
            self._memory = Slots(self.capacity, shape, device=device, pin_memory=pin_memory)
        except (RuntimeError, MemoryError) as error:  # torch has no error of its own for this
            raise BudgetExceeded(
                f"the machine refuses a {self.name} budget of {budget_bytes} bytes; lower the "
                "budget"
            ) from error
        self.slab, self.k, self.v = self._memory.slab, self._memory.k, self._memory.v
        self.lengths = self._memory.lengths
        self._table = SlotTable(self.capacity, policy)
        # A lock of C, not a condition of Python: an interrupt between taking one and the block it
        # guards would keep it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # thread -> leases that it took and that are not released
        self._lessees: dict[int, int] = {}
        # units that some thread is reading right now -> their slots
        self._arriving: dict[BlockKey, int] = {}
        self._predicted: set[BlockKey] = set()  # of these, what is prefetched
        self._ahead = 0  # slots that prefetches are reading into
        self._short = 0  # threads that wait for slots
        with _forking:
            _all.add(self)

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
            self._table.counts.add_lookup(len(units), len(missing), waited, self.unit_bytes)
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

    def admit(self, units: Sequence[BlockKey], k: Tensor, v: Tensor, length: int) -> None:
        """Cache units of so many valid content tokens that were computed instead of being read from
        below; they count as missed. Those that there is no room for now are passed over.

        k, v: [n, block_size, D], zero from `length` on.
        """
        with self._lock:
            self._table.counts.add_lookup(len(units), len(units), 0.0, self.unit_bytes)
            new = [
                at
                for at, unit in enumerate(units)
                if unit not in self._table.slots and unit not in self._arriving
            ]
            new = new[: 0 if self._short else self._table.room()]
            wanted = [units[at] for at in new]
            taken = self._table.take(wanted)
            self.k[taken], self.v[taken] = k[new], v[new]
            self._memory.note_lengths(taken, [length] * len(taken))
            self._table.slots.update(zip(wanted, taken))
            self._changed.notify_all()

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

        k, v: [n, Hkv, block_size, D]. lengths: valid content tokens of each block (None = all of
        them full). The units must be new. Raises BudgetExceeded (and holds none of them) if they do
        not fit.
        """
        n, heads, block_size, _ = k.shape
        units = [
            BlockKey(document, layer, block, head)
            for block, head in product(range(first_block, first_block + n), range(heads))
        ]
        thread, until = threading.get_ident(), time.perf_counter() + self.patience
        with self._lock:
            while (room := self._table.room()) < len(units):
                if self._wait_for_room(len(units), room, 0, thread, until):
                    continue
                raise BudgetExceeded(
                    f"the {self.name} tier of {self.capacity * self.unit_bytes} bytes has no room "
                    f"for {len(units)} "
                    f"more blocks of a running session; raise the {self.name} budget"
                )
            taken = self._table.take(units, cached=False)
            slots = torch.tensor(taken, dtype=torch.int64)
            where = (
                slice(taken[0], taken[-1] + 1)
                if n and taken[-1] - taken[0] == len(taken) - 1
                else slots
            )
            self.k[where] = k.reshape(-1, *self.k.shape[1:])
            self.v[where] = v.reshape(-1, *self.v.shape[1:])
            of_blocks = [block_size] * n if lengths is None else lengths
            self._memory.note_lengths(taken, [length for length in of_blocks for _ in range(heads)])
            self._table.slots.update(zip(units, taken))
            self._table.pinned.update(units)
        return units

    def unpin(self, units: Iterable[BlockKey]) -> None:
        """Cache pinned units like any other: the source below has them now."""
        with self._lock:
            for unit in units:
                if unit in self._table.pinned:
                    self._table.pinned.remove(unit)
                    self._table.policy.insert(unit, full=False, blocked=self._table.blocked)
            self._changed.notify_all()

    def drop(self, units: Iterable[BlockKey]) -> None:
        """Drop units, pinned or not, also those that are being read. A lease on one keeps its slot
        unchanged until the lease ends.
        """
        with self._lock:
            for unit in units:
                slot = self._table.slots.pop(unit, None)
                unused = unit in self._table.untouched or unit in self._predicted
                if slot is None:
                    slot = self._arriving.pop(unit, None)
                if slot is None:
                    continue
                if unit in self._table.pinned:
                    self._table.pinned.remove(unit)
                else:
                    self._table.policy.drop(unit)
                if unused:
                    self._table.untouched.discard(unit)
                    self._predicted.discard(unit)
                    self._table.counts.unused += 1
                self._table.vacate(slot)
            self._changed.notify_all()

    def drop_document(self, document: int, first_block: int = 0) -> None:
        """Drop what is held or on its way of a document from block `first_block` on. Waits for
        nothing.
        """
        with self._lock:
            held = [*self._table.slots, *self._arriving]
            self.drop(
                [unit for unit in held if unit.document == document and unit.block >= first_block]
            )

    # Counting

    @property
    def bytes(self) -> int:
        """Bytes of slots in use; at most the budget."""
        with self._lock:
            return (len(self._table.units) + len(self._table.orphans)) * self.unit_bytes

    def holds(self, unit: BlockKey) -> bool:
        """Is the unit here (no lookup is counted)?"""
        with self._lock:
            return unit in self._table.slots

    def stats(self) -> TierStats:
        """Lookups so far."""
        with self._lock:
            return replace(self._table.counts)

    # Inside

    def _in_child(self) -> None:
        """In a forked child nothing that its parent's threads were reading arrives, and none of
        them waits.
        """
        self.drop(list(self._arriving))
        self._ahead = self._short = 0

    def _wait_for_room(
        self, needed: int, room: int, cached: int, thread: int, until: float
    ) -> bool:
        """Wait for something that may make room; False where waiting cannot help, or has lasted too
        long.

        cached: units in the policy's care that are needed too.
        """
        later = room + self._ahead
        # no thread waits for this one, so it may wait for all others
        if not self._lessees.get(thread):
            later = self.capacity - len(self._table.pinned) - cached
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
        """Wait until no unit is on its way in another thread; return the seconds that took."""
        began = 0.0
        while not self._arriving.keys().isdisjoint(units):
            began = began or time.perf_counter()
            late = self._predicted.intersection(units)
            self._changed.wait()
            for unit in late & self._table.untouched:
                self._table.untouched.remove(unit)
                self._table.counts.late += 1
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
        that is dropped while it is read is not held afterwards, though a lease on it stays valid.
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
                    self._table.counts.seconds += time.perf_counter() - began
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


def _before() -> None:
    _forking.acquire()
    _locked.extend(_all)
    for one in _locked:
        one._lock.acquire()


def _after(*, in_child: bool) -> None:
    for one in _locked:
        if in_child:
            one._in_child()
        one._lock.release()
    _locked.clear()
    _forking.release()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(in_child=False),
    after_in_child=lambda: _after(in_child=True),
)
