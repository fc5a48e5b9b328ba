"""Which cached unit goes when one must: LRU, ARC, S3-FIFO and LFU behind one interface.

Each chooses as libcachesim does for objects of equal size, except that blocked units are passed
over: they keep their place, and an eviction pays one call of `blocked` for each of them that stands
before the unit that goes.

Queues are OrderedDicts, oldest first. A plain dict keeps the order too, but finding its first key
walks over all that was deleted before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from memstore.block import BlockKey
from memstore.errors import InvalidConfig

Blocked: TypeAlias = Callable[[BlockKey], bool]
Queue: TypeAlias = "OrderedDict[BlockKey, None]"


class Policy(Protocol):
    """Which cached unit goes when one must.

    It sees cached units only, never pinned ones; its tier holds its lock while calling.
    """

    name: str

    def hit(self, unit: BlockKey) -> None:
        """A request found this unit; one that is not known here (a pinned one) is ignored."""
        ...

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        """A request missed this unit, and it is cached from now on; return the unit that goes for
        it.

        full: there is no free slot, so one cached unit goes, of those that are not `blocked`; the
        caller guarantees that there is one. It may be full with fewer than `capacity` units cached.
        With full=False nothing goes, and the answer is None.
        """
        ...

    def drop(self, unit: BlockKey) -> None:
        """This unit is cached no more, though it was not evicted; nothing of it is remembered."""
        ...

    def __len__(self) -> int:
        """Cached units."""
        ...

    def __contains__(self, unit: object) -> bool:
        """Is this unit cached?"""
        ...


def _oldest(units: Iterable[BlockKey], blocked: Blocked) -> BlockKey | None:
    for unit in units:
        if not blocked(unit):
            return unit
    return None


class LRU:
    """Evicts the unit that was not used for the longest time."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        self._order: Queue = OrderedDict()

    def hit(self, unit: BlockKey) -> None:
        if unit in self._order:
            self._order.move_to_end(unit)

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        victim = None
        if full:
            victim = _oldest(self._order, blocked)
            assert victim is not None, "every cached unit is blocked"
            del self._order[victim]
        self._order[unit] = None
        return victim

    def drop(self, unit: BlockKey) -> None:
        self._order.pop(unit, None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, unit: object) -> bool:
        return unit in self._order


class ARC:
    """Adaptive replacement cache (Megiddo & Modha, FAST 2003, figure 4): balances recency and
    frequency by itself.

    T1 holds units seen once lately, T2 units seen more often, each in order of use; B1 and B2
    remember what went from them. Being asked for a unit of B1 or B2 moves p, the share of T1, up or
    down. p is a real number, as in the paper and libcachesim. At most `capacity` units are in T1
    and B1 together, and twice that in all four.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._p = 0.0  # slots that T1 should have
        self._t1: Queue = OrderedDict()
        self._t2: Queue = OrderedDict()
        self._b1: Queue = OrderedDict()
        self._b2: Queue = OrderedDict()

    def hit(self, unit: BlockKey) -> None:
        if unit in self._t2:
            self._t2.move_to_end(unit)
        elif unit in self._t1:
            del self._t1[unit]
            self._t2[unit] = None

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        again = t2
        from_b2 = False
        if unit in b1:
            self._p = min(self._p + max(1.0, len(b2) / len(b1)), self._capacity)
            del b1[unit]
        elif unit in b2:
            self._p = max(self._p - max(1.0, len(b1) / len(b2)), 0.0)
            del b2[unit]
            from_b2 = True
        else:
            again = t1
        victim = self._replace(from_b2, blocked) if full else None
        again[unit] = None
        # The paper makes room for the ghosts first. The result is the same, and this also holds
        # after a drop.
        while b1 and len(t1) + len(b1) > self._capacity:
            b1.popitem(last=False)
        while b2 and len(t1) + len(b1) + len(t2) + len(b2) > 2 * self._capacity:
            b2.popitem(last=False)
        return victim

    def _replace(self, from_b2: bool, blocked: Blocked) -> BlockKey:
        """REPLACE of the paper; where all of one list is blocked, the other one gives."""
        seen_once, seen_often = (self._t1, self._b1), (self._t2, self._b2)
        size = len(self._t1)
        if size > self._p or (size == self._p and from_b2):
            order = (seen_once, seen_often)
        else:
            order = (seen_often, seen_once)
        for cached, ghosts in order:
            victim = _oldest(cached, blocked)
            if victim is not None:
                del cached[victim]
                ghosts[victim] = None
                return victim
        raise AssertionError("every cached unit is blocked")

    def drop(self, unit: BlockKey) -> None:
        for queue in (self._t1, self._t2, self._b1, self._b2):
            queue.pop(unit, None)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, unit: object) -> bool:
        return unit in self._t1 or unit in self._t2


class S3FIFO:
    """Three FIFO queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP
    2023).

    New units go to a small queue, meant for a tenth of the capacity. From there a unit that was hit
    twice moves to the main queue; any other goes and is remembered in the ghost queue, nine tenths
    of the capacity long, and if it is missed while it is there, it comes back into the main queue.
    A unit at the end of the main queue has one more round for each hit, of which three are counted.

    The parameters are libcachesim's defaults. So is the filling of an empty cache, which is not the
    paper's: until the cache is full for the first time, what does not fit into the small queue goes
    to the main queue.
    """

    name = "s3fifo"

    _PROMOTE = 2  # hits in the small queue that move a unit to the main queue
    _MOST = 3  # hits that are counted: two bits

    def __init__(self, capacity: int, small: float = 0.1, ghost: float = 0.9) -> None:
        """small, ghost: units that the small and the ghost queue are for, as shares of the
        capacity.
        """
        self._small_slots = max(1, int(capacity * small))
        self._main_slots = capacity - self._small_slots
        self._ghost_slots = int(capacity * ghost)
        self._evicted = False  # has it ever been full?
        # unit -> hits since it came into this queue
        self._small: OrderedDict[BlockKey, int] = OrderedDict()
        self._main: OrderedDict[BlockKey, int] = OrderedDict()  # unit -> rounds it still has
        self._ghost: Queue = OrderedDict()

    def hit(self, unit: BlockKey) -> None:
        queue = self._main
        hits = queue.get(unit)
        if hits is None:
            queue = self._small
            hits = queue.get(unit)
        if hits is not None and hits < self._MOST:
            queue[unit] = hits + 1

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        queue = self._small
        if unit in self._ghost:
            del self._ghost[unit]
            queue = self._main
        victim = self._evict(blocked) if full else None
        if not self._evicted and len(self._small) >= self._small_slots:
            queue = self._main
        queue[unit] = 0
        return victim

    def _evict(self, blocked: Blocked) -> BlockKey:
        self._evicted = True
        victim = None
        if not self._small or len(self._main) > self._main_slots:
            victim = self._evict_main(blocked)
        if victim is None:
            victim = self._evict_small(blocked)
        if victim is None:  # whatever is not blocked is in the main queue now
            victim = self._evict_main(blocked)
        assert victim is not None, "every cached unit is blocked"
        return victim

    def _evict_small(self, blocked: Blocked) -> BlockKey | None:
        """Move units to the main queue until one goes to the ghosts, or nothing is left that is not
        blocked.
        """
        promoted = []
        victim = None
        for unit, hits in self._small.items():
            if blocked(unit):
                continue
            if hits < self._PROMOTE:
                victim = unit
                break
            promoted.append(unit)
        for unit in promoted:
            del self._small[unit]
            self._main[unit] = 0
        if victim is not None:
            del self._small[victim]
            self._ghost[victim] = None
            if len(self._ghost) > self._ghost_slots:
                self._ghost.popitem(last=False)
        return victim

    def _evict_main(self, blocked: Blocked) -> BlockKey | None:
        """Give units another round until one has none left and goes, or None if all of them are
        blocked.
        """
        main = self._main
        while True:
            again = []
            victim = None
            for unit, rounds in main.items():
                if blocked(unit):
                    continue
                if rounds == 0:
                    victim = unit
                    break
                again.append(unit)
            for unit in again:
                main[unit] -= 1
                main.move_to_end(unit)
            if victim is not None:
                del main[victim]
            if victim is not None or not again:
                return victim

    def drop(self, unit: BlockKey) -> None:
        self._small.pop(unit, None)
        self._main.pop(unit, None)
        self._ghost.pop(unit, None)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, unit: object) -> bool:
        return unit in self._small or unit in self._main


class _Bucket:
    """Cached units that were asked for equally often, in the order in which they came to be; a
    linked list's node.
    """

    __slots__ = ("next", "previous", "units", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.units: Queue = OrderedDict()
        self.previous: _Bucket = self
        self.next: _Bucket = self


class LFU:
    """Evicts the unit that was asked for least often since it is cached, of several the first that
    came to be so.

    Constant time by buckets of equal count (Shah, Mitra & Matani, "An O(1) algorithm for
    implementing the LFU cache eviction scheme", 2010). Counts neither age nor outlive an eviction.
    """

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        self._ends = _Bucket(0)  # before the least used and after the most used bucket
        self._bucket: dict[BlockKey, _Bucket] = {}

    def hit(self, unit: BlockKey) -> None:
        bucket = self._bucket.get(unit)
        if bucket is None:
            return
        more = bucket.uses + 1
        if len(bucket.units) == 1 and bucket.next.uses != more:
            bucket.uses = more  # alone before and after
            return
        self._append(unit, bucket, more)
        self._remove(unit, bucket)

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        victim = self._evict(blocked) if full else None
        self._append(unit, self._ends, 1)
        return victim

    def _evict(self, blocked: Blocked) -> BlockKey:
        bucket = self._ends.next
        while bucket is not self._ends:
            victim = _oldest(bucket.units, blocked)
            if victim is not None:
                self.drop(victim)
                return victim
            bucket = bucket.next
        raise AssertionError("every cached unit is blocked")

    def _append(self, unit: BlockKey, after: _Bucket, uses: int) -> None:
        """Put a unit into the bucket of this count, which is the one after `after` or is new
        there.
        """
        bucket = after.next
        if bucket.uses != uses:
            bucket = _Bucket(uses)
            bucket.previous, bucket.next = after, after.next
            after.next.previous = after.next = bucket
        bucket.units[unit] = None
        self._bucket[unit] = bucket

    def _remove(self, unit: BlockKey, bucket: _Bucket) -> None:
        del bucket.units[unit]
        if not bucket.units:
            bucket.previous.next, bucket.next.previous = bucket.next, bucket.previous

    def drop(self, unit: BlockKey) -> None:
        bucket = self._bucket.pop(unit, None)
        if bucket is not None:
            self._remove(unit, bucket)

    def __len__(self) -> int:
        return len(self._bucket)

    def __contains__(self, unit: object) -> bool:
        return unit in self._bucket


POLICIES: dict[str, Callable[[int], Policy]] = {
    policy.name: policy for policy in (LRU, ARC, S3FIFO, LFU)
}


def make_policy(name: str, capacity: int) -> Policy:
    """A policy by name for a tier of `capacity` slots. Raises InvalidConfig, which lists the names
    there are.
    """
    if name not in POLICIES:
        raise InvalidConfig(
            f"eviction policy {name!r} is unknown; choose one of {', '.join(POLICIES)}"
        )
    return POLICIES[name](capacity)
