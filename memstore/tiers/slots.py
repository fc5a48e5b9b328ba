"""The memory of a tier: equal slots in one slab; its page table (the slots of each unit, their
leases, the free ones) and counts; leases on slots; and the interface of the source that fills them.

A block takes one slot. A passage takes as many as its tokens need, so that little room is lost to
padding: a slot is then a page of PAGE tokens.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.tiers.policy import make_policy

PAGE = 16  # tokens of a slot, of units that take several
_CPU = torch.device("cpu")


class UnitShape(NamedTuple):
    """The keys and values [block_size, head_dim] of a unit, their dtype, and a slot's tokens."""

    block_size: int
    head_dim: int
    dtype: torch.dtype
    slot_size: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values in a slot."""
        return 2 * self.slot_size * self.head_dim * self.dtype.itemsize

    @property
    def most_slots(self) -> int:
        """Maximum number of slots of a unit."""
        return self.slots_of(self.block_size)

    def slots_of(self, tokens: int) -> int:
        """Number of slots of a unit of so many tokens."""
        return -(-tokens // self.slot_size)


Held = tuple[int, ...]
"""The slots of a unit, in the order of its tokens."""


class Slots:
    """Slots on a device.

    slab: [S, 2, slot_size, head_dim] in the KV dtype, K before V as in a record; k, v: its halves,
    [S, slot_size, head_dim]; lengths: int64 [S], valid content tokens in a slot; lengths_here: a
    copy in main memory, so that leases need not wait for the device. Slots that never held a unit
    take no main memory.
    """

    def __init__(self, count: int, shape: UnitShape, device: torch.device = _CPU) -> None:
        """Main memory is page-locked if there is a CUDA device to copy to. Raises RuntimeError or
        MemoryError if the machine refuses the memory.
        """
        dtype, size = shape.dtype, shape.slot_size
        of_slab = (count, 2, size, shape.head_dim)
        if device.type != "cpu":
            self.slab = torch.empty(of_slab, dtype=dtype, device=device)
        elif torch.cuda.is_available():
            self.slab = torch.empty(of_slab, dtype=dtype, pin_memory=True)
        else:  # NumPy asks for huge pages, whose first use takes a third of the time
            memory = np.empty(count * shape.slot_bytes, dtype=np.uint8)
            self.slab = torch.from_numpy(memory).view(dtype).view(of_slab)
        self.k, self.v = self.slab.unbind(1)
        if device.type == "cpu":  # zeros that are not written before a unit comes
            self.lengths: Tensor = torch.from_numpy(np.zeros(count, dtype=np.int64))
            self.lengths[:1] = size  # attention looks there for a unit that has no slot
            self.lengths_here = self.lengths
        else:
            self.lengths = torch.full((count,), size, dtype=torch.int64, device=device)
            self.lengths_here = torch.full((count,), size, dtype=torch.int64)
        self._lengths, self._size = self.lengths_here.numpy(), size

    def note_units(self, units: Iterable[tuple[Held, int]]) -> None:
        """Set the valid content tokens of units in their slots. All blocks but a document's last
        are full, so lengths on a device seldom change.
        """
        size, slots, lengths = self._size, list[int](), list[int]()
        for held, length in units:
            slots += held
            lengths += [min(size, max(0, length - at * size)) for at in range(len(held))]
        where, new = np.array(slots, dtype=np.int64), np.array(lengths, dtype=np.int64)
        changed = self._lengths[where] != new
        if changed.any():
            where, new = where[changed], new[changed]
            self._lengths[where] = new
            if self.lengths is not self.lengths_here:
                there = self.lengths.device
                self.lengths[torch.from_numpy(where).to(there)] = torch.from_numpy(new).to(there)


@dataclass
class TierStats:
    """Lookups of one tier since it was opened.

    Every unit of a lookup is a hit or a miss. `prefetched` and `late` are parts of the hits; a unit
    that another lookup is reading is a hit, too. So misses and prefetches are the reads from below.
    """

    hits: int = 0  # units that were here, or on their way
    misses: int = 0  # units that this lookup had to fetch from below
    bytes: int = 0  # decoded bytes delivered
    # upper tiers: time that lookups waited for the tier below; disk: time spent on reading
    seconds: float = 0.0
    evictions: int = 0  # units dropped to make room
    prefetched: int = 0  # first lookups of a unit that a prefetch had brought in time
    late: int = 0  # first lookups of a unit that had to wait for its prefetch
    unused: int = 0  # prefetched units that went again before anything looked them up

    def add_lookup(self, units: int, missing: int, waited: float, bytes: int) -> None:
        """Count a lease: units looked up, distinct ones missing, seconds waited, bytes decoded."""
        self.hits += units - missing
        self.misses += missing
        self.bytes += bytes
        self.seconds += waited


COUNTS = tuple(field.name for field in fields(TierStats))


class TierCounter:
    """Counts a tier's lookups, and its failed reads by reason. Safe for several threads.

    A count replaces `stats` or `failures` and never changes them, so that a caller may hold both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stats = TierStats()
        self.failures: dict[str, int] = {}

    def failed(self, reason: str) -> None:
        """Count a failed read, by reason; it is neither a hit nor a miss."""
        with self._lock:
            self.failures = self.failures | {reason: self.failures.get(reason, 0) + 1}

    def count(self, *, hits: int, misses: int = 0, bytes: int, seconds: float) -> None:
        """Add to the counts."""
        with self._lock:
            now = replace(self.stats)
            now.add_lookup(hits + misses, misses, seconds, bytes)
            self.stats = now


class SlotTable:
    """The page table of a tier, used under the tier's lock."""

    def __init__(self, capacity: int, policy: str) -> None:
        """capacity: slots. policy: see memstore.tiers.policy. Raises InvalidConfig."""
        self.capacity, self.policy = capacity, make_policy(policy, capacity)
        self.slots: dict[BlockKey, Held] = {}  # of units that are held, cached or pinned
        self.pinned: set[BlockKey] = set()
        self.pinned_slots = 0
        self.leases: dict[int, int] = {}  # slot -> leases on it; a prefetch has one while it reads
        # slot -> the unit that is in it or on its way into it
        self.units: dict[int, BlockKey] = {}
        self.untouched: set[BlockKey] = set()  # prefetched units that nothing looked up yet
        # leased slots whose unit was dropped; free when the lease ends
        self.orphans: set[int] = set()
        self.free: list[int] = []
        self.fresh = 0  # slots from here on were never used
        self.counts = TierStats()

    def room(self) -> int:
        """Number of available slots: free, never used, or of a cached unit without leases."""
        leased = sum(self.units.get(slot) in self.policy for slot in self.leases)
        cached = len(self.units) - self.pinned_slots
        return self._empty() + cached - leased

    def take(
        self, units: Sequence[BlockKey], sizes: Sequence[int], *, cached: bool = True
    ) -> list[Held]:
        """Take sizes[i] slots for new unit i, evicting others if none is free; there must be room.
        cached: whether the policy manages the units.
        """
        taken: list[int] = []
        for unit, size in zip(units, sizes):
            victim = (
                self.policy.insert(unit, full=self._empty() < size, blocked=self.blocked)
                if cached
                else None
            )
            if victim is not None:
                self._evict(victim)
            while self._empty() < size:
                self._evict(self.policy.evict(self.blocked))
            fresh = max(0, size - len(self.free))
            taken += [self.free.pop() for _ in range(size - fresh)]
            taken += range(self.fresh, self.fresh + fresh)
            self.fresh += fresh
        # neighbours in a record go to neighbouring slots, if any are: the source copies them as one
        taken.sort()
        ends = list(accumulate(sizes, initial=0))
        held = [tuple(taken[first:end]) for first, end in pairwise(ends)]
        self.units.update((slot, unit) for unit, some in zip(units, held) for slot in some)
        return held

    def trim(self, held: Held, size: int) -> Held:
        """Free a unit's slots beyond the first `size`, which only its one lease knows; return the
        others.
        """
        for slot in held[size:]:
            del self.units[slot], self.leases[slot]
        self.free += held[size:]
        return held[:size]

    def blocked(self, unit: BlockKey) -> bool:
        """Whether a unit must not be evicted now."""
        held = self.slots.get(unit)
        return held is None or held[0] in self.leases  # None: on its way

    def hold(self, slots: Iterable[int]) -> None:
        """Add a lease to each of these slots, which are not evicted while they have one."""
        leases = self.leases
        for slot in slots:
            leases[slot] = leases.get(slot, 0) + 1

    def unlease(self, held: Iterable[int]) -> None:
        """Remove a lease from each of these slots. The last lease on a slot of a dropped unit frees
        the slot.
        """
        leases = self.leases
        for slot in held:
            left = leases[slot] - 1
            if left:
                leases[slot] = left
            else:
                del leases[slot]
                if slot in self.orphans:
                    self.orphans.remove(slot)
                    self.free.append(slot)

    def vacate(self, slot: int) -> None:
        """Free a slot of a dropped unit, once no lease holds it."""
        del self.units[slot]
        if slot in self.leases:
            self.orphans.add(slot)
        else:
            self.free.append(slot)

    def pin(self, unit: BlockKey, held: Held) -> None:
        """Keep a unit in these slots until it is unpinned."""
        self.slots[unit] = held
        self.pinned.add(unit)
        self.pinned_slots += len(held)

    def unpin(self, unit: BlockKey) -> None:
        """End the pinning of a unit that is still in its slots."""
        self.pinned.remove(unit)
        self.pinned_slots -= len(self.slots[unit])

    def hit(self, units: Iterable[BlockKey]) -> None:
        """Tell the policy that these units were looked up and found."""
        hit, untouched = self.policy.hit, self.untouched
        for unit in units:
            # the use for which it was cached is no second use, as policies take a hit to be
            if unit in untouched:
                untouched.remove(unit)
                self.counts.prefetched += 1
            else:
                hit(unit)

    def _empty(self) -> int:
        return len(self.free) + self.capacity - self.fresh

    def _evict(self, victim: BlockKey) -> None:
        held = self.slots.pop(victim)
        for slot in held:
            del self.units[slot]
        self.free += held
        self.counts.evictions += 1
        if victim in self.untouched:
            self.untouched.remove(victim)
            self.counts.unused += 1


class Source(Protocol):
    """The interface from which a tier reads missing units."""

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """Fill slots slots[i] of the slab with unit units[i]; return each unit's valid content
        tokens, and the name of the tier that had it.

        slab: [S, 2, slot_size, head_dim] in the KV dtype, K before V. Every unit has slots for
        block_size tokens. Rows after a unit's tokens in the last slot that it needs
        are zero. Units come in any order; no two may have the same slot. After an error the
        contents of the slots are undefined.

        Raises CorruptBlock (the message names the unit's record) and DocumentNotFound (deleted, or
        never stored).
        """
        ...


class LowestTier(Source, Protocol):
    """The tier, or several tiers in order, from which the host tier reads."""

    @property
    def counters(self) -> Mapping[str, TierCounter]:
        """The counts of its tiers by name, top first."""
        ...

    def close(self) -> None:
        """End its threads; idempotent."""
        ...


@dataclass
class Lease:
    """Slots that hold the requested units and are not evicted until `release` (or the end of the
    `with` block).

    of_units: the slots of each requested unit, in the order of the request.
    tier: the name of the tier that owns the slots.
    fetched: for each slot that this lease filled, the name of the tier that its unit came from.
    slab: [S, 2, slot_size, head_dim], K before V, zero after a unit's last token. It may be on a
    device; everything else is on the CPU.
    slot_lengths: int64 [S], content tokens in each slot.
    """

    of_units: Sequence[Held]
    tier: str
    fetched: Mapping[int, str]
    slab: Tensor
    slot_lengths: Tensor
    on_release: Callable[[], None] = field(repr=False)
    released: bool = False

    @property
    def k(self) -> Tensor:
        """Keys [S, slot_size, head_dim], to index with slots."""
        return self.slab.select(1, 0)

    @property
    def v(self) -> Tensor:
        """Values, likewise."""
        return self.slab.select(1, 1)

    @cached_property
    def held(self) -> list[int]:
        """The slots of all units, unit by unit."""
        return [*chain.from_iterable(self.of_units)]

    @cached_property
    def slots(self) -> Tensor:
        """The slots of all units, int64 [n]."""
        return torch.tensor(self.held, dtype=torch.int64)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The T valid content tokens of all units, unit by unit: rows [R, head_dim], a view of the
        slab, and the numbers of those that are keys and values, int64 [T] each. All are on the
        slab's device.
        """
        size, dim = self.slab.shape[2:]
        lengths = self.slot_lengths[self.slots]
        before = lengths.cumsum(0) - lengths
        first = (2 * size * self.slots - before).repeat_interleave(lengths)
        keys = (first + torch.arange(len(first))).to(self.slab.device)
        return self.slab.view(-1, dim), keys, keys + size

    @property
    def lengths(self) -> Tensor:
        """int64 [n], valid content tokens of each unit."""
        lengths = self.slot_lengths[self.slots]
        if len(self.held) == len(self.of_units):
            return lengths
        ends = [*accumulate(map(len, self.of_units), initial=0)]
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))[ends].diff()

    @property
    def tiers(self) -> list[str]:
        """The tier that had each requested unit."""
        return [self.fetched.get(held[0], self.tier) for held in self.of_units]

    def release(self) -> None:
        """Give the slots back; idempotent."""
        if not self.released:
            self.released = True
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
