"""Records the lookups of a memory, and replays them against a policy and a capacity, without a
model and without any data.

A trace is zstd over msgpack: a header, then one entry for each lookup or prediction, [0 or 1,
microseconds, layer, documents, blocks, heads, places of missed units]; documents, blocks and heads
have one number a unit.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import zstandard

from memstore.block import BlockKey
from memstore.tiers.cascade import Cascade
from memstore.tiers.policy import make_policy

_LOOKUP, _PREDICTION = 0, 1


@contextmanager
def recorded(tiers: Cascade, path: Path) -> Iterator[None]:
    """Write the lookups and predictions of these tiers to a trace."""
    entries: list[Any] = [{"format": 1}]

    def kept(kind: int, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def keep(units: Sequence[BlockKey]) -> Any:
            for layer, some in groupby(units, key=lambda unit: unit.layer):
                documents, _, blocks, heads = zip(*some)
                entries.append([kind, 0, layer, documents, blocks, heads, []])
            return call(units)

        return keep

    with (
        patch.object(tiers.top, "lease", kept(_LOOKUP, tiers.top.lease)),
        patch.object(tiers, "expect", kept(_PREDICTION, tiers.expect)),
    ):
        yield
    with zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=9)) as file:
        file.write(b"".join(map(msgpack.packb, entries)))


@dataclass(frozen=True)
class Recorded:
    """The lookups of a trace, and aligned with them what was predicted since the lookup before.

    Blocks of sessions' own are left out: they are pinned, so no policy decides about them.
    """

    requests: list[list[BlockKey]]
    predicted: list[list[BlockKey]]

    @classmethod
    def load(cls, trace: Path) -> "Recorded":
        """The lookups of a trace."""
        requests: list[list[BlockKey]] = []
        predicted: list[list[BlockKey]] = []
        ahead: list[BlockKey] = []
        with zstandard.open(trace, "rb") as file:
            _, *entries = msgpack.Unpacker(file)
        for kind, _, layer, *columns, _ in entries:
            units = [BlockKey(d, layer, b, h) for d, b, h in zip(*columns) if d >= 0]
            if kind == _PREDICTION:
                ahead += units
            elif units:
                requests.append(units)
                predicted.append(ahead)
                ahead = []
        return cls(requests, predicted)

    @property
    def units(self) -> int:
        """Distinct units in the lookups."""
        return len({unit for request in self.requests for unit in request})


@dataclass(frozen=True)
class ReplayResult:
    """Counts of units over all lookups."""

    hits: int  # found in the cache
    misses: int  # not found, and cached then

    @property
    def hit_rate(self) -> float:
        """Hits over all units asked for; 0 without any."""
        return self.hits / (self.hits + self.misses) if self.hits else 0.0


def replay(
    requests: Iterable[Sequence[Hashable]],
    capacity: int,
    policy: str,
    predicted: Iterable[Sequence[Hashable]] = (),
) -> ReplayResult:
    """What a cache of `capacity` units under this policy does with recorded lookups.

    requests: the distinct units of each lookup. A lookup leases its units, so none of them leaves
    the cache meanwhile. Units that are found count as used first, then the missing ones are cached,
    each in the order of the request. A lookup with more units than the capacity is split into
    groups. predicted: for each request, units that were predicted just before it. They arrive at
    once here, so the prefetched share is the most that is possible.

    Raises InvalidConfig for an unknown policy.
    """
    cache = _Cache(capacity, policy)
    for request, ahead in zip_longest(requests, predicted, fillvalue=()):
        cache.expect(ahead)
        cache.lookup(request)
    return ReplayResult(cache.hits, cache.misses)


class _Cache:
    """A tier that holds keys without data."""

    def __init__(self, capacity: int, policy: str) -> None:
        self._cache = make_policy(policy, capacity)
        self._capacity = capacity
        self._untouched: set[Any] = set()  # brought by a prediction, not asked for yet
        self.hits = self.misses = 0

    def lookup(self, request: Sequence[Hashable]) -> None:
        """Look the units of one request up, and cache those that were missing."""
        cache = self._cache
        for units in _groups([request], self._capacity):
            missing = [unit for unit in units if unit not in cache]
            if len(missing) < len(units):
                for unit in units:
                    # the first use of a prefetched unit is none that policies count
                    if unit in self._untouched:
                        self._untouched.remove(unit)
                    else:
                        cache.hit(unit)  # ignores the missing ones
            if missing:
                self._insert(missing, frozenset(units).__contains__)
            self.hits += len(units) - len(missing)
            self.misses += len(missing)

    def expect(self, units: Sequence[Hashable]) -> None:
        """Insert the units of a prediction, up to the capacity; cached ones are skipped."""
        missing = [unit for unit in dict.fromkeys(units) if unit not in self._cache][
            : self._capacity
        ]
        if missing:
            self._insert(missing, frozenset(missing).__contains__)
            self._untouched.update(missing)

    def _insert(self, units: Sequence[Any], blocked: Callable[[BlockKey], bool]) -> None:
        for unit in units:
            full = len(self._cache) == self._capacity
            self._untouched.discard(self._cache.insert(unit, full=full, blocked=blocked))


def belady(requests: Iterable[Sequence[Hashable]], capacity: int) -> ReplayResult:
    """The most hits that any policy can have, knowing the future: the unit goes whose next use is
    farthest.

    requests, capacity: as `replay` takes them. O(n log n) for n units in all (Belady, "A study of
    replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966).
    """
    numbers: dict[Hashable, int] = {}
    steps = [
        [numbers.setdefault(unit, len(numbers)) for unit in units]
        for units in _groups(requests, capacity)
    ]
    never = len(steps)
    upcoming = [never] * len(numbers)  # by unit: the next step that asks for it
    uses: list[list[int]] = []  # by step, last one first: when each of its units is used next
    for step in range(len(steps) - 1, -1, -1):
        uses.append([upcoming[unit] for unit in steps[step]])
        for unit in steps[step]:
            upcoming[unit] = step

    cached: set[int] = set()
    # (minus the next use, unit), farthest first. The units of a running step are due in it, and
    # what was due earlier is stale, so neither comes before a unit that may go.
    farthest: list[tuple[int, int]] = []
    hits = misses = 0
    for units in steps:
        missing = [unit for unit in units if unit not in cached]
        for _ in range(len(cached) + len(missing) - capacity):
            cached.remove(heappop(farthest)[1])
        cached.update(missing)
        for unit, use in zip(units, uses.pop()):
            heappush(farthest, (-use, unit))
        hits += len(units) - len(missing)
        misses += len(missing)
    return ReplayResult(hits, misses)


def _groups(requests: Iterable[Sequence[Hashable]], capacity: int) -> Iterator[list[Any]]:
    """The units of each lookup, split where they exceed the capacity."""
    for request in requests:
        units = list(dict.fromkeys(request))
        for start in range(0, len(units), capacity):
            yield units[start : start + capacity]
