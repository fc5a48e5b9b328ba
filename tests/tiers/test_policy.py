"""Eviction policies have the hits of libcachesim, lookup by lookup."""

import random
from collections.abc import Hashable, Iterable
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from memstore.tiers.policy import POLICIES, Policy, make_policy

LENGTH = 4000
NAMES = list(POLICIES)


# Request streams: units are numbers from 0


def zipf(rng: random.Random, units: int, length: int) -> list[int]:
    return rng.choices(range(units), [1 / (rank + 1) ** 0.9 for rank in range(units)], k=length)


def scans(rng: random.Random) -> list[int]:
    """A hot set with scans in between, in which no unit comes twice."""
    fresh = iter(range(1000, 1000 + LENGTH))
    return [unit for turn in range(5) for unit in (*zipf(rng, 60, 200), *islice(fresh, 50 << turn))]


def loops() -> list[int]:
    """Round and round, a little longer than each of the capacities that are tried."""
    lengths = ((2, 30), (4, 30), (12, 20), (22, 20), (120, 5), (1100, 2))
    return [unit for length, rounds in lengths for _ in range(rounds) for unit in range(length)]


STREAMS: dict[str, list[int]] = {"scan": scans(random.Random(1)), "loop": loops()}


def free(unit: Hashable) -> bool:
    return False


def hits(policy: Policy, stream: Iterable[Any], slots: int) -> list[bool]:
    """Which requests find their unit in a cache of `slots` slots."""
    found = []
    for unit in stream:
        found.append(unit in policy)
        if found[-1]:
            policy.hit(unit)
        else:
            policy.insert(unit, full=len(policy) == slots, blocked=free)
    return found


# Against libcachesim


@pytest.fixture(scope="module")
def libcachesim() -> ModuleType:
    return pytest.importorskip("libcachesim")


def library_hits(simulated: Any, library: ModuleType, stream: Iterable[int]) -> list[bool]:
    return [bool(simulated.get(library.Request(obj_id=unit + 1, obj_size=1))) for unit in stream]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", NAMES)
def test_hits_equal_libcachesim(name: str, stream: str, libcachesim: ModuleType) -> None:
    for capacity in (1, 2, 3, 10, 20, 25, 100, 1000):
        simulated = getattr(libcachesim, name.upper())(capacity, hashpower=10)
        expected = library_hits(simulated, libcachesim, STREAMS[stream])
        assert hits(make_policy(name, capacity), STREAMS[stream], capacity) == expected, capacity
