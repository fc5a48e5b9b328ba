"""The host tier: units in main memory, in equal slots of one slab that attention reads directly.

A byte budget is never exceeded. Cached units come from the source below and are evicted as the policy says; leased
units stay until the lease ends; pinned units (a session's own and not yet committed blocks, which no source below has)
stay until they are unpinned.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, DocumentNotFound
from memstore.tiers.base import Lease, TierStats, UnitSource


class Policy(Protocol):
    """Which cached unit goes first. It sees cached units only, never pinned ones; the tier holds its lock while
    calling.
    """

    def admit(self, units: Iterable[BlockKey]) -> None:
        """Units are cached now."""

    def touch(self, units: Iterable[BlockKey]) -> None:
        """Units were asked for and found; some may be pinned and unknown here."""

    def remove(self, unit: BlockKey) -> None:
        """A unit is cached no more (evicted or dropped)."""

    def candidates(self) -> Iterator[BlockKey]:
        """Every cached unit, the one to evict first at the front."""


class LRU:
    """Evicts the unit that was not used for the longest time."""

    def __init__(self) -> None:
        self._order: dict[BlockKey, None] = {}  # a dict keeps the order of insertion: oldest use first

    def admit(self, units: Iterable[BlockKey]) -> None:
        self._order.update(dict.fromkeys(units))

    def touch(self, units: Iterable[BlockKey]) -> None:
        order = self._order
        for unit in units:
            if unit in order:
                del order[unit]
                order[unit] = None

    def remove(self, unit: BlockKey) -> None:
        self._order.pop(unit, None)

    def candidates(self) -> Iterator[BlockKey]:
        return iter(self._order)


class NoSource:
    """Below a memory without a directory: nothing was ever stored."""

    def read(self, units: Sequence[BlockKey], out_k: Tensor, out_v: Tensor, slots: Sequence[int]) -> list[int]:
        raise DocumentNotFound(
            f"document {units[0].document} is not in this memory, which holds only its sessions' own blocks"
        )


class HostTier:
    """Slots for units in main memory.

    k, v: slabs [S, block_size, head_dim] in the KV dtype; lengths: int64 [S], valid content tokens of the unit in a
    slot. S is what the budget admits; pages of the slabs that were never written cost no memory. Safe for several
    threads.
    """

    def __init__(
        self,
        source: UnitSource,
        budget_bytes: int,
        *,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        policy: Policy | None = None,
    ) -> None:
        """Raises BudgetExceeded if not even one unit fits, or the machine refuses the memory."""
        self.budget_bytes = budget_bytes
        self.unit_bytes = 2 * block_size * head_dim * dtype.itemsize
        self.capacity = budget_bytes // self.unit_bytes
        if self.capacity < 1:
            raise BudgetExceeded(
                f"a host budget of {budget_bytes} bytes holds no block; "
                f"one takes {self.unit_bytes} bytes, so raise the budget"
            )
        try:
            self.k = torch.empty(self.capacity, block_size, head_dim, dtype=dtype)
            self.v = torch.empty(self.capacity, block_size, head_dim, dtype=dtype)
        except RuntimeError as error:  # torch has no error of its own for this on the CPU
            raise BudgetExceeded(
                f"the machine refuses a host budget of {budget_bytes} bytes; lower the budget"
            ) from error
        self.lengths = torch.zeros(self.capacity, dtype=torch.int64)
        self.source = source  # where misses are read from
        self._policy = policy if policy is not None else LRU()
        self._lock = threading.Condition()
        self._slots: dict[BlockKey, int] = {}  # units that are held, cached or pinned
        self._pinned: set[BlockKey] = set()
        self._leases: dict[int, int] = {}  # slot -> leases on it
        self._arriving: set[BlockKey] = set()  # units that some thread is reading right now
        self._orphans: set[int] = set()  # leased slots whose unit was dropped; free when the lease ends
        self._free: list[int] = []
        self._fresh = 0  # slots from here on were never used
        self._counts: dict[int, list[float]] = {}  # layer -> hits, misses, bytes, seconds, evictions

    # Reading

    def lease(self, units: Sequence[BlockKey]) -> Lease:
        """Slots that hold these units until the lease is released; what is missing is read from below. Repeats are
        allowed.

        Raises BudgetExceeded if the units do not fit beside what is pinned and leased (its `fits` is how many would);
        and what the source raises: CorruptBlock, DocumentNotFound.
        """
        with self._lock:
            slots = self._find(units)
            missing = self._make_room(units, slots) if None in slots else {}
            held = [missing[unit] if slot is None else slot for unit, slot in zip(units, slots)]
            leases = self._leases
            for slot in held:
                leases[slot] = leases.get(slot, 0) + 1
            self._policy.touch(units)
            self._count_lookups(units, missing)
        if missing:
            self._fetch(missing, held)
        taken = torch.tensor(held, dtype=torch.int64)
        missed = torch.tensor([slot is None for slot in slots], dtype=torch.bool)
        return Lease(taken, self.lengths[taken], missed, self.k, self.v, lambda: self._release(held))

    def _find(self, units: Sequence[BlockKey]) -> list[int | None]:
        """The slot of each unit or None, once no unit is on its way in another thread."""
        while self._arriving and not self._arriving.isdisjoint(units):
            self._lock.wait()
        return list(map(self._slots.get, units))

    def _make_room(self, units: Sequence[BlockKey], slots: Sequence[int | None]) -> dict[BlockKey, int]:
        """Slots for the distinct units that are not held, marked as arriving."""
        missing = list(dict.fromkeys(unit for unit, slot in zip(units, slots) if slot is None))
        room = self._take(len(missing), keep=set(units))
        if room is None:
            wanted = set(units)
            busy = {slot for unit, slot in self._slots.items() if unit in self._pinned or slot in self._leases}
            fits = self.capacity - len((busy | self._orphans) - {self._slots[u] for u in wanted if u in self._slots})
            raise BudgetExceeded(
                f"{len(wanted)} blocks are needed at once and the host tier has room for {fits} "
                f"({self.capacity} in all); "
                "raise the host budget or read with fewer blocks a step",
                fits,
            )
        arriving = dict(zip(missing, room))
        self._arriving.update(missing)
        return arriving

    def _fetch(self, missing: dict[BlockKey, int], held: list[int]) -> None:
        """Read units from below into their slots, outside the lock; on failure nothing of this lease remains."""
        began = time.perf_counter()
        lengths: list[int] | None = None
        try:
            lengths = self.source.read(list(missing), self.k, self.v, list(missing.values()))
        finally:
            with self._lock:
                self._arriving.difference_update(missing)
                if lengths is not None:
                    self.lengths[torch.tensor(list(missing.values()))] = torch.tensor(lengths)
                    self._slots.update(missing)
                    self._policy.admit(missing)
                    counts = self._layer_counts(next(iter(missing)).layer)
                    counts[3] += time.perf_counter() - began
                else:
                    self._orphans.update(missing.values())
                    self._unlease(held)
                self._lock.notify_all()

    def _release(self, held: list[int]) -> None:
        with self._lock:
            self._unlease(held)

    def _unlease(self, held: Iterable[int]) -> None:
        leases = self._leases
        for slot in held:
            left = leases[slot] - 1
            if left:
                leases[slot] = left
            else:
                del leases[slot]
                if slot in self._orphans:
                    self._orphans.remove(slot)
                    self._free.append(slot)

    def _take(self, n: int, keep: set[BlockKey]) -> list[int] | None:
        """n slots, evicting cached units outside `keep` that nobody leases; None (and nothing evicted) if there are not
        enough.
        """
        room = self._free[-n:] if n else []
        fresh = min(n - len(room), self.capacity - self._fresh)
        short = n - len(room) - fresh
        victims: list[BlockKey] = []
        if short > 0:
            for unit in self._policy.candidates():
                if self._slots[unit] not in self._leases and unit not in keep:
                    victims.append(unit)
                    if len(victims) == short:
                        break
            else:
                return None
        if room:
            del self._free[-len(room) :]
        room.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        for unit in victims:
            self._policy.remove(unit)
            room.append(self._slots.pop(unit))
            self._layer_counts(unit.layer)[4] += 1
        return room

    # Pinned units

    def pin(
        self, document: int, layer: int, first_block: int, k: Tensor, v: Tensor, last_length: int | None = None
    ) -> list[BlockKey]:
        """Hold blocks first_block .. of a document as pinned units, in one copy; return the units, block by block.

        k, v: [n, Hkv, block_size, D]. last_length: valid content tokens of the last block (None = all). The units must
        be new. Raises BudgetExceeded (and holds none of them) if they do not fit.
        """
        n, heads, block_size, _ = k.shape
        units = [
            BlockKey(document, layer, block, head)
            for block, head in product(range(first_block, first_block + n), range(heads))
        ]
        with self._lock:
            room = self._take(len(units), keep=set())
            if room is None:
                raise BudgetExceeded(
                    f"the host tier of {self.capacity * self.unit_bytes} bytes has no room for {len(units)} more "
                    "blocks of a running session; raise the host budget"
                )
            slots = torch.tensor(room, dtype=torch.int64)
            self.k[slots] = k.reshape(-1, *self.k.shape[1:])
            self.v[slots] = v.reshape(-1, *self.v.shape[1:])
            self.lengths[slots] = block_size
            if last_length is not None and n:
                self.lengths[slots[-heads:]] = last_length
            self._slots.update(zip(units, room))
            self._pinned.update(units)
        return units

    def unpin(self, units: Sequence[BlockKey]) -> None:
        """The units are in the source below now: from here on they are cached like any other."""
        with self._lock:
            known = [unit for unit in units if unit in self._pinned]
            self._pinned.difference_update(known)
            self._policy.admit(known)

    def drop(self, units: Iterable[BlockKey]) -> None:
        """Hold these units no longer, pinned or not; a lease on one keeps its slot as it is until the lease ends."""
        with self._lock:
            for unit in units:
                slot = self._slots.pop(unit, None)
                if slot is None:
                    continue
                if unit in self._pinned:
                    self._pinned.remove(unit)
                else:
                    self._policy.remove(unit)
                if slot in self._leases:
                    self._orphans.add(slot)
                else:
                    self._free.append(slot)

    def drop_document(self, document: int, first_block: int = 0) -> None:
        """Drop what is held of a document from block `first_block` on."""
        with self._lock:
            while any(unit.document == document for unit in self._arriving):
                self._lock.wait()
            units = [unit for unit in self._slots if unit.document == document and unit.block >= first_block]
            self.drop(units)

    # Counting

    @property
    def bytes(self) -> int:
        """Bytes of slots in use; at most the budget."""
        with self._lock:
            return (len(self._slots) + len(self._orphans) + len(self._arriving)) * self.unit_bytes

    def holds(self, unit: BlockKey) -> bool:
        """Is the unit here (no lookup is counted)?"""
        with self._lock:
            return unit in self._slots

    def layers(self) -> dict[int, TierStats]:
        """Lookups so far, by layer."""
        with self._lock:
            return {
                layer: TierStats(int(hits), int(misses), int(size), seconds, int(evictions))
                for layer, (hits, misses, size, seconds, evictions) in sorted(self._counts.items())
            }

    def stats(self) -> TierStats:
        """Lookups so far; `seconds` is the time spent waiting for the tier below."""
        return sum(self.layers().values(), TierStats())

    def _layer_counts(self, layer: int) -> list[float]:
        counts = self._counts.get(layer)
        if counts is None:
            counts = self._counts[layer] = [0, 0, 0, 0.0, 0]
        return counts

    def _count_lookups(self, units: Sequence[BlockKey], missing: dict[BlockKey, int]) -> None:
        if units:
            counts = self._layer_counts(units[0].layer)  # a step asks for one layer at a time
            counts[0] += len(units) - len(missing)
            counts[1] += len(missing)
            counts[2] += len(units) * self.unit_bytes
