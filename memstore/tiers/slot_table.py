"""The page table of a tier: which unit is in which slot, how many lease it, and what is free."""

from collections.abc import Iterable, Sequence

from memstore.block import BlockKey
from memstore.tiers.policy import make_policy
from memstore.tiers.stats import EVICTIONS, PREFETCHED, UNUSED, LayerCounts


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
        self.counts = LayerCounts()

    def room(self) -> int:
        """Slots that could be had now: free, never used, or of a cached unit that nobody leases or
        waits for.
        """
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
                counts = self.counts.of(victim.layer)
                counts[EVICTIONS] += 1
                if victim in self.untouched:
                    self.untouched.remove(victim)
                    counts[UNUSED] += 1
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
        """The unit of a slot is gone: the slot is free, once nobody leases it."""
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
                self.counts.of(unit.layer)[PREFETCHED] += 1
            else:
                hit(unit)
