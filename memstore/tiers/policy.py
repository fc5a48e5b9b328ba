"""Eviction policies: LRU and ARC behind one interface; and the options of a memory's tiers, of
which the policy is one.

Each policy evicts as libcachesim does for objects of equal size, but skips blocked units: they keep
their place, and an eviction calls `blocked` once for each unit before the one that it evicts.

Queues are OrderedDicts, oldest first. A plain dict keeps the order too, but finding its first key
walks over all deleted keys before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypedDict, get_args

from memstore.block import BlockKey
from memstore.errors import InvalidConfig

Blocked: TypeAlias = Callable[[BlockKey], bool]
Queue: TypeAlias = "OrderedDict[BlockKey, None]"


def _oldest(units: Iterable[BlockKey], blocked: Blocked) -> BlockKey | None:
    return next((unit for unit in units if not blocked(unit)), None)


class LRU:
    """Evicts the unit that was not used for the longest time.

    A policy sees only cached units, never pinned ones; its tier holds its lock during calls.
    """

    name = "lru"

    def __init__(self, capacity: int) -> None:
        self._order: Queue = OrderedDict()

    def hit(self, unit: BlockKey) -> None:
        """A lookup found this unit; an unknown unit (a pinned one) is ignored."""
        if unit in self._order:
            self._order.move_to_end(unit)

    def insert(self, unit: BlockKey, *, full: bool, blocked: Blocked) -> BlockKey | None:
        """A lookup missed this unit, and it is cached from now on; return the unit evicted for it,
        None with full=False.

        full: no slot is free, so one cached unit that is not `blocked` is evicted; the caller
        guarantees that there is one. A tier may be full with fewer than `capacity` units.
        """
        victim = self.evict(blocked) if full else None
        self._order[unit] = None
        return victim

    def evict(self, blocked: Blocked) -> BlockKey:
        """Evict a unit that is not `blocked`; the caller guarantees that there is one."""
        victim = _oldest(self._order, blocked)
        assert victim is not None, "every cached unit is blocked"
        del self._order[victim]
        return victim

    def drop(self, unit: BlockKey) -> None:
        """The tier dropped this unit; the policy forgets it."""
        self._order.pop(unit, None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, unit: object) -> bool:
        return unit in self._order


class ARC:
    """Adaptive replacement cache (Megiddo & Modha, FAST 2003, figure 4): balances recency and
    frequency by itself.

    T1 holds units seen once recently, T2 units seen more often, each in order of use; B1 and B2
    remember what was evicted from them. A lookup of a unit in B1 or B2 moves p, the share of T1, up
    or down. p is a real number, as in the paper and libcachesim. At most `capacity` units are in T1
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
        # the paper makes room for the ghosts first; this gives the same, also after a drop
        while b1 and len(t1) + len(b1) > self._capacity:
            b1.popitem(last=False)
        while b2 and len(t1) + len(b1) + len(t2) + len(b2) > 2 * self._capacity:
            b2.popitem(last=False)
        return victim

    def evict(self, blocked: Blocked) -> BlockKey:
        return self._replace(False, blocked)

    def _replace(self, from_b2: bool, blocked: Blocked) -> BlockKey:
        """REPLACE of the paper; if all units of one list are blocked, evict from the other."""
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


Policy: TypeAlias = LRU | ARC
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRU, ARC)}


def make_policy(name: str, capacity: int) -> Policy:
    """The policy of a name, for a tier of `capacity` slots. Raises InvalidConfig, which lists the
    names.
    """
    if name not in POLICIES:
        raise InvalidConfig(
            f"eviction policy {name!r} is unknown; choose one of {', '.join(POLICIES)}"
        )
    return POLICIES[name](capacity)


# Options of tiers, checked before the tiers are made

HOST_BUDGET = 1 << 30
DEFAULT_POLICY = "arc"
Predictor = Literal["off", "speculative"]
PREDICTORS = get_args(Predictor)


class TierOptions(TypedDict, total=False):
    """Settings of a memory's tiers; each has a default."""

    host_budget: int  # bytes of main memory for blocks (default 1 GiB)
    policy: str  # of eviction: see memstore.tiers.policy
    prefetch: Predictor  # which units are read ahead: see memory_attention.py
    device: str | None  # a torch device with a tier of its own, or None
    device_budget: int  # bytes of the device's memory for blocks (default 1 GiB)


def check_options(options: TierOptions) -> None:
    """Check the names of policy and prefetcher. Raises InvalidConfig."""
    policy, prefetch = options.get("policy", DEFAULT_POLICY), options.get("prefetch", "off")
    make_policy(policy, 1)
    if prefetch not in PREDICTORS:
        raise InvalidConfig(
            f"prefetch {prefetch!r} is unknown; choose one of {', '.join(PREDICTORS)}"
        )
