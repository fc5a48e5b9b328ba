"""Eviction policies and their replay: hit for hit those of libcachesim, and safe with leases, pins
and drops.
"""

import random
from collections.abc import Hashable, Iterable
from itertools import chain, islice
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def mixed(rng: random.Random) -> list[int]:
    pieces = [
        stream[i : i + 100]
        for stream in (zipf(rng, 2000, LENGTH), scans(rng))
        for i in range(0, LENGTH, 100)
    ]
    rng.shuffle(pieces)
    return list(chain.from_iterable(pieces))[:LENGTH]


STREAMS: dict[str, list[int]] = {
    "scan": scans(random.Random(1)),
    "loop": loops(),
    "mixed": mixed(random.Random(3)),
}


def free(unit: Hashable) -> bool:
    return False


def hits(policy: Policy, stream: Iterable[Any], slots: int) -> list[bool]:
    """Which requests find their unit in a cache of so many slots."""
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


# What a tier relies on


def ghosts(policy: Policy) -> list[Any]:
    """Units that a policy remembers without holding them."""
    queues = (getattr(policy, name, ()) for name in ("_b1", "_b2"))
    return [unit for queue in queues for unit in queue]


UNITS = st.integers(0, 11)
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"), st.sets(UNITS, min_size=1, max_size=5), st.sets(UNITS, max_size=4)
        ),
        st.tuples(st.just("pin"), UNITS, st.none()),
        st.tuples(st.just("unpin"), st.none(), st.none()),
        st.tuples(st.just("drop"), UNITS, st.none()),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", NAMES)
@given(capacity=st.integers(1, 8), events=EVENTS)
@settings(max_examples=50)
def test_policy_respects_leases_pins_and_drops(
    name: str, capacity: int, events: list[tuple[str, Any, Any]]
) -> None:
    policy: Any = make_policy(name, capacity)
    cached: set[int] = set()
    pinned = 0

    def evict_for(unit: Any, blocked: set[int]) -> bool:
        """Cache a unit as a tier would; False if there is no slot for it."""
        full = len(cached) + pinned == capacity
        if full and cached <= blocked:
            return False
        victim = policy.insert(unit, full=full, blocked=blocked.__contains__)
        if full:
            assert victim in cached - blocked
            cached.remove(victim)
        else:
            assert victim is None
        cached.add(unit)
        return True

    for event, subject, leased in events:
        if event == "request":
            blocked = subject | leased
            for unit in sorted(subject):
                if unit in cached:
                    policy.hit(unit)
                else:
                    evict_for(unit, blocked)
        elif event == "pin":
            if evict_for("pinned", set()):
                policy.drop("pinned")
                cached.remove("pinned")
                pinned += 1
        elif event == "unpin":
            pinned = max(0, pinned - 1)
        else:
            policy.drop(subject)
            cached.discard(subject)
            assert subject not in ghosts(policy)
        policy.hit("unknown")
        assert len(policy) == len(cached)
        assert {unit for unit in range(12) if unit in policy} == cached
        assert len(set(ghosts(policy))) == len(ghosts(policy)) <= 2 * capacity - len(cached)
        assert (
            cached.isdisjoint(ghosts(policy))
            and "unknown" not in policy
            and "pinned" not in ghosts(policy)
        )


# Replay
