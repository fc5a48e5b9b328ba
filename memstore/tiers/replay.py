"""Replays recorded lookups against a policy and a capacity, without a model and without any data."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from memstore.tiers.policy import make_policy


@dataclass(frozen=True)
class ReplayResult:
    """Units of all lookups, counted."""

    hits: int  # found in the cache
    misses: int  # not found, and cached then
    evictions: int  # gone to make room

    @property
    def hit_rate(self) -> float:
        """Hits over all units asked for; 0 without any."""
        return self.hits / (self.hits + self.misses) if self.hits else 0.0


def replay(requests: Iterable[Sequence[Hashable]], capacity: int, policy: str) -> ReplayResult:
    """What a cache of `capacity` units under this policy makes of recorded lookups.

    requests: the distinct units of each lookup. A lookup leases its units, so none of them goes while it lasts; those
    that are found count as used before those that are missing are cached, each in the order of the request. One with
    more units than the capacity is done in groups of at most so many.

    Raises InvalidConfig for an unknown policy.
    """
    cache = make_policy(policy, capacity)
    hits = misses = evictions = 0
    for units in _groups(requests, capacity):
        missing = [unit for unit in units if unit not in cache]
        if len(missing) < len(units):
            for unit in units:
                cache.hit(unit)  # ignores the missing ones
        if missing:
            blocked = frozenset(units).__contains__
            for unit in missing:
                full = len(cache) == capacity
                cache.insert(unit, full=full, blocked=blocked)
                evictions += full
        hits += len(units) - len(missing)
        misses += len(missing)
    return ReplayResult(hits, misses, evictions)


def belady(requests: Iterable[Sequence[Hashable]], capacity: int) -> ReplayResult:
    """The most hits that any policy can have, knowing the future: the unit goes whose next use is farthest.

    requests, capacity: as `replay` takes them. O(n log n) for n units in all (Belady, "A study of replacement
    algorithms for a virtual-storage computer", IBM Systems Journal 1966).
    """
    numbers: dict[Hashable, int] = {}
    steps = [[numbers.setdefault(unit, len(numbers)) for unit in units] for units in _groups(requests, capacity)]
    never = len(steps)
    upcoming = [never] * len(numbers)  # by unit: the next step that asks for it
    uses: list[list[int]] = []  # by step, last one first: when each of its units is used next
    for step in range(len(steps) - 1, -1, -1):
        uses.append([upcoming[unit] for unit in steps[step]])
        for unit in steps[step]:
            upcoming[unit] = step

    cached: set[int] = set()
    # (minus the next use, unit), farthest first. The units of a running step are due in it, and what was due earlier
    # is stale, so neither comes before a unit that may go.
    farthest: list[tuple[int, int]] = []
    hits = misses = evictions = 0
    for units in steps:
        missing = [unit for unit in units if unit not in cached]
        for _ in range(len(cached) + len(missing) - capacity):
            cached.remove(heappop(farthest)[1])
            evictions += 1
        cached.update(missing)
        for unit, use in zip(units, uses.pop()):
            heappush(farthest, (-use, unit))
        hits += len(units) - len(missing)
        misses += len(missing)
    return ReplayResult(hits, misses, evictions)


def _groups(requests: Iterable[Sequence[Hashable]], capacity: int) -> Iterator[list[Any]]:
    """The units of each lookup, split where they exceed the capacity."""
    for request in requests:
        units = list(dict.fromkeys(request))
        for start in range(0, len(units), capacity):
            yield units[start : start + capacity]
