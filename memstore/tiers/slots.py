"""The memory of a tier: equal slots in one slab, each for the keys and values of a unit; its page
table (which unit is in which slot, how many lease it, what is free); leases on slots, and the
interface of what fills them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.tiers.policy import make_policy
from memstore.tiers.stats import TierCounter, TierStats


class UnitShape(NamedTuple):
    """What a slot has room for: keys and values [block_size, head_dim] in a dtype."""

    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.block_size * self.head_dim * self.dtype.itemsize


class Slots:
    """Slots on a device.

    slab: [S, 2, block_size, head_dim] in the KV dtype, K before V as in a record; k, v: its halves,
    [S, block_size, head_dim]; lengths: int64 [S], valid content tokens of the unit in a slot;
    lengths_here: the same in main memory, so that leases need not wait for the device.
    Slots that never held a unit cost no main memory.
    """

    def __init__(
        self,
        count: int,
        shape: UnitShape,
        *,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """pin_memory: page-locked, for copies to a CUDA device. Raises RuntimeError or MemoryError
        where the machine refuses the memory.
        """
        block_size, head_dim, dtype = shape
        of_slab = (count, 2, block_size, head_dim)
        if pin_memory or torch.device(device).type != "cpu":
            self.slab = torch.empty(of_slab, dtype=dtype, device=device, pin_memory=pin_memory)
        else:  # NumPy asks for huge pages, whose first use takes a third of the time
            memory = np.empty(count * shape.bytes, dtype=np.uint8)
            self.slab = torch.from_numpy(memory).view(dtype).view(of_slab)
        self.k, self.v = self.slab.unbind(1)
        if torch.device(device).type == "cpu":  # zeros that are not written before a unit comes
            self.lengths: Tensor = torch.from_numpy(np.zeros(count, dtype=np.int64))
            self.lengths[:1] = block_size  # attention looks there for a unit that has no slot
            self.lengths_here = self.lengths
        else:
            self.lengths = torch.full((count,), block_size, dtype=torch.int64, device=device)
            self.lengths_here = torch.full((count,), block_size, dtype=torch.int64)
        self._lengths = self.lengths_here.numpy()

    def note_lengths(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the lengths of units in slots. All blocks but a document's last are full, so lengths
        on a device seldom change.
        """
        where, new = np.array(slots, dtype=np.int64), np.array(lengths, dtype=np.int64)
        changed = self._lengths[where] != new
        if changed.any():
            where, new = where[changed], new[changed]
            self._lengths[where] = new
            if self.lengths is not self.lengths_here:
                there = self.lengths.device
                self.lengths[torch.from_numpy(where).to(there)] = torch.from_numpy(new).to(there)


class SlotTable:
    """Used under the lock of its tier."""

    def __init__(self, capacity: int, policy: str) -> None:
        """capacity: slots. policy: see memstore.tiers.policy. Raises InvalidConfig."""
        self.capacity, self.policy = capacity, make_policy(policy, capacity)
        self.slots: dict[BlockKey, int] = {}  # of units that are held, cached or pinned
        self.pinned: set[BlockKey] = set()
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
        """Slots that are available now: free, never used, or of a cached unit without leases."""
        leased = sum(self.units.get(slot) in self.policy for slot in self.leases)
        return len(self.free) + self.capacity - self.fresh + len(self.policy) - leased

    def take(self, units: Sequence[BlockKey], *, cached: bool = True) -> list[int]:
        """A slot for each of some new units, evicting where none is free; there must be room.
        cached: the policy keeps them.
        """
        policy, taken = self.policy, []
        for unit in units:
            full = not self.free and self.fresh == self.capacity
            victim = (
                policy.insert(unit, full=full, blocked=self.blocked) if cached or full else None
            )
            if not cached:
                policy.drop(unit)
            if victim is not None:
                slot = self.slots.pop(victim)
                self.counts.evictions += 1
                if victim in self.untouched:
                    self.untouched.remove(victim)
                    self.counts.unused += 1
            elif self.free:
                slot = self.free.pop()
            else:
                slot = self.fresh
                self.fresh += 1
            taken.append(slot)
        # neighbours in a record go to neighbouring slots, if any are: the source copies them as one
        taken.sort()
        self.units.update(zip(taken, units))
        return taken

    def blocked(self, unit: BlockKey) -> bool:
        """May a unit not be evicted now?"""
        slot = self.slots.get(unit)
        return slot is None or slot in self.leases  # None: on its way

    def hold(self, slots: Iterable[int]) -> None:
        """One lease more on each."""
        leases = self.leases
        for slot in slots:
            leases[slot] = leases.get(slot, 0) + 1

    def unlease(self, held: Iterable[int]) -> None:
        """One lease fewer on each."""
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
        """Free the slot of a dropped unit, once no lease holds it."""
        del self.units[slot]
        if slot in self.leases:
            self.orphans.add(slot)
        else:
            self.free.append(slot)

    def hit(self, units: Iterable[BlockKey]) -> None:
        """These units were looked up and are here."""
        hit, untouched = self.policy.hit, self.untouched
        for unit in units:
            # the use for which it was cached is no second use, as policies take a hit to be
            if unit in untouched:
                untouched.remove(unit)
                self.counts.prefetched += 1
            else:
                hit(unit)


class UnitSource(Protocol):
    """A source that an upper tier reads its misses from."""

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of the slab with unit `units[i]`; return each unit's valid content
        tokens.

        slab: [S, 2, block_size, head_dim] in the KV dtype, K before V, of a CPU tier for the disk
        below it. Rows of a slot at and after the returned length are zero. Units come in any order;
        no two may have the same slot. After an error the contents of the slots are undefined.

        Raises CorruptBlock (the message names the unit's record) and DocumentNotFound (forgotten,
        or never stored).
        """
        ...


class LowestTier(UnitSource, Protocol):
    """A source that is a tier, or several below each other, and counts."""

    @property
    def counters(self) -> Mapping[str, TierCounter]:
        """The counts of its tiers by name, top first."""
        ...

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """As `read`; of each unit also the name of the tier that had it."""
        ...

    def close(self) -> None:
        """End its threads; idempotent."""
        ...


@dataclass
class Lease:
    """Slots that hold the requested units and are not evicted until `release` (or the end of the
    `with` block).

    held: of each requested unit its slot; tier: the name of the tier whose slots they are; fetched:
    of the slots that this lease had to fill, the name of the tier that had the unit; k, v: slabs
    [S, block_size, head_dim] to index with slots, views of one in which K and V of a slot are
    neighbours; a unit's rows at and after its length are zero; slot_lengths: int64 [S], the
    lengths. The slabs may be on a device, the rest is not.
    """

    held: Sequence[int]
    tier: str
    fetched: Mapping[int, str]
    k: Tensor
    v: Tensor
    slot_lengths: Tensor
    on_release: Callable[[], None] = field(repr=False)
    released: bool = False

    @cached_property
    def slots(self) -> Tensor:
        """int64 [n], the slots."""
        return torch.tensor(self.held, dtype=torch.int64)

    def contents(self) -> tuple[Tensor, Tensor]:
        """K and V [n, block_size, head_dim] of the units, copied, where the slabs are."""
        there = self.slots.to(self.k.device)
        return self.k.index_select(0, there), self.v.index_select(0, there)

    @property
    def lengths(self) -> Tensor:
        """int64 [n], valid content tokens of each unit."""
        return self.slot_lengths[self.slots]

    @property
    def tiers(self) -> list[str]:
        """Of each requested unit the tier that had it."""
        return [self.fetched.get(slot, self.tier) for slot in self.held]

    def release(self) -> None:
        """Give the slots back; idempotent."""
        if not self.released:
            self.released = True
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
