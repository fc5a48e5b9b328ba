"""Eviction policies and their replay: hit for hit those of libcachesim, and safe with leases, pins
and drops.
"""

import copy
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from itertools import chain, combinations, islice
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.block import BlockKey
from memstore.errors import InvalidConfig
from memstore.tiers.policy import POLICIES, Policy, make_policy
from memstore.tiers.replay import ReplayResult, belady, replay

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


def shifting(rng: random.Random) -> list[int]:
    """A working set that moves on."""
    return [start // 4 + rng.randrange(150) for start in range(LENGTH)]


def mixed(rng: random.Random) -> list[int]:
    pieces = [
        stream[i : i + 100]
        for stream in (zipf(rng, 2000, LENGTH), scans(rng))
        for i in range(0, LENGTH, 100)
    ]
    rng.shuffle(pieces)
    return list(chain.from_iterable(pieces))[:LENGTH]


STREAMS: dict[str, list[int]] = {
    "zipf": zipf(random.Random(0), 3000, LENGTH),
    "scan": scans(random.Random(1)),
    "loop": loops(),
    "shifting": shifting(random.Random(2)),
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
def test_every_request_hits_or_misses_as_in_libcachesim(
    name: str, stream: str, libcachesim: ModuleType
) -> None:
    for capacity in (1, 2, 3, 10, 20, 25, 100, 1000):
        simulated = getattr(libcachesim, name.upper())(capacity, hashpower=10)
        expected = library_hits(simulated, libcachesim, STREAMS[stream])
        assert hits(make_policy(name, capacity), STREAMS[stream], capacity) == expected, capacity


@pytest.mark.parametrize("stream", STREAMS)
def test_belady_has_as_many_hits_as_in_libcachesim(stream: str, libcachesim: ModuleType) -> None:
    units = STREAMS[stream]
    later: dict[int, int] = {}
    following = [0] * len(units)
    for time in range(len(units) - 1, -1, -1):
        following[time] = later.get(units[time], 2**63 - 1)
        later[units[time]] = time
    for capacity in (1, 3, 100):
        simulated = libcachesim.Belady(capacity, hashpower=10)
        found = [
            simulated.get(libcachesim.Request(obj_id=unit + 1, obj_size=1, next_access_vtime=time))
            for unit, time in zip(units, following)
        ]
        misses = len(units) - sum(found)
        expected = ReplayResult(sum(found), misses, misses - simulated.get_n_obj())
        assert belady([[unit] for unit in units], capacity) == expected


# Against the published algorithms, written down as they are, on plain lists with the oldest unit
# first. They yield for each request whether it hits, and which unit goes.

Steps = list[tuple[bool, int | None]]


def published_lru(stream: Iterable[int], size: int) -> Steps:
    order: list[int] = []
    steps: Steps = []
    for x in stream:
        hit = x in order
        victim = None
        if hit:
            order.remove(x)
        elif len(order) == size:
            victim = order.pop(0)
        order.append(x)
        steps.append((hit, victim))
    return steps


def published_arc(stream: Iterable[int], c: int) -> Steps:
    """Figure 4 of the ARC paper."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0

    def replace(in_b2: bool) -> int:
        if t1 and (len(t1) > p or (in_b2 and len(t1) == p)):
            b1.append(t1.pop(0))
            return b1[-1]
        b2.append(t2.pop(0))
        return b2[-1]

    steps: Steps = []
    for x in stream:
        victim = None
        hit = x in t1 or x in t2
        if hit:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            p = min(c, p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            victim = replace(False)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            p = max(0, p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            victim = replace(True)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    victim = replace(False)
                else:
                    victim = t1.pop(0)
            elif total >= c:
                if total == 2 * c:
                    b2.pop(0)
                victim = replace(False)
            t1.append(x)
        steps.append((hit, victim))
    return steps


PUBLISHED: dict[str, Callable[[Iterable[int], int], Steps]] = {
    "lru": published_lru,
    "arc": published_arc,
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_request_hits_and_evicts_as_published(name: str, stream: str) -> None:
    for capacity in (1, 2, 3, 10, 40):
        policy: Any = make_policy(name, capacity)
        steps: Steps = []
        for unit in STREAMS[stream]:
            hit = unit in policy
            victim = None
            if hit:
                policy.hit(unit)
            else:
                victim = policy.insert(unit, full=len(policy) == capacity, blocked=free)
            steps.append((hit, victim))
        assert steps == PUBLISHED[name](STREAMS[stream], capacity), capacity


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
@settings(max_examples=100)
def test_leases_pins_and_drops_are_kept(
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


@pytest.mark.parametrize("name", NAMES)
def test_a_blocked_unit_is_passed_over_and_keeps_its_place(name: str) -> None:
    policy: Any = make_policy(name, 20)
    for unit in range(20):
        policy.insert(unit, full=False, blocked=free)
    first, second = (
        copy.deepcopy(policy).insert(20, full=True, blocked=skip)
        for skip in (free, {0}.__contains__)
    )
    assert (first, second) == (0, 1)
    assert policy.insert(20, full=True, blocked={0}.__contains__) == second
    assert policy.insert(21, full=True, blocked=free) == first


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_remembered_of_a_dropped_unit(name: str) -> None:
    policy: Any = make_policy(name, 10)
    hits(policy, STREAMS["zipf"][:500], 10)
    for unit in [*range(3000), "never seen"]:
        policy.drop(unit)
    assert len(policy) == 0 and ghosts(policy) == []
    policy.insert("not read after all", full=False, blocked=free)
    policy.drop("not read after all")
    assert "not read after all" not in policy and ghosts(policy) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", ["zipf", "scan", "mixed"])
def test_with_half_of_the_slots_pinned_a_policy_is_about_as_good_as_with_half_the_capacity(
    name: str, stream: str
) -> None:
    half = sum(hits(make_policy(name, 50), STREAMS[stream], 50))
    pinned = sum(hits(make_policy(name, 100), STREAMS[stream], 50))
    assert pinned >= 0.95 * half
    if name == "lru":
        assert pinned == half


def test_policies_are_chosen_by_name() -> None:
    assert NAMES == ["lru", "arc"]
    assert [make_policy(name, 3).name for name in NAMES] == NAMES
    with pytest.raises(InvalidConfig, match="'fifo' is unknown; choose one of lru, arc"):
        make_policy("fifo", 3)


# Replay


@pytest.mark.parametrize("name", NAMES)
def test_replay_of_single_units_counts_what_the_policy_does(name: str) -> None:
    steps = PUBLISHED[name](STREAMS["mixed"], 30)
    found = sum(hit for hit, _ in steps)
    keys = {unit: BlockKey(unit, 0, unit % 7, 1) for unit in STREAMS["mixed"]}
    result = replay([[keys[unit]] for unit in STREAMS["mixed"]], 30, name)
    assert result == ReplayResult(
        found, len(steps) - found, sum(victim is not None for _, victim in steps)
    )
    assert result.hit_rate == found / len(steps)


@pytest.mark.parametrize("name", NAMES)
def test_the_units_of_one_lookup_do_not_evict_each_other(name: str) -> None:
    # Whatever the policy prefers, after [0, 1, 2] has been looked up in 4 slots, all three are
    # there.
    requests = [[3, 4, 5, 6], [0, 1, 2], [2, 1, 0]]
    assert replay(requests, 4, name) == ReplayResult(3, 7, 3)
    assert belady(requests, 4) == ReplayResult(3, 7, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_lookup_larger_than_the_capacity_is_done_in_groups(name: str) -> None:
    requests = [range(7), range(6, 9)]  # 0 1 2, 3 4 5, 6; then 6 7 8
    assert replay(requests, 3, name).misses == belady(requests, 3).misses == 9
    assert belady(requests, 3) == ReplayResult(1, 9, 6)


def test_nothing_replayed_is_nothing_counted() -> None:
    assert replay([], 3, "arc") == belady([[]], 3) == ReplayResult(0, 0, 0)
    assert ReplayResult(0, 0, 0).hit_rate == 0.0
    with pytest.raises(InvalidConfig):
        replay([], 3, "fifo")


def fewest_misses(requests: Sequence[frozenset[int]], capacity: int) -> int:
    """Over every choice of units to keep."""

    @cache
    def rest(step: int, cached: frozenset[int]) -> int:
        if step == len(requests):
            return 0
        wanted = requests[step]
        others = cached - wanted
        kept = combinations(sorted(others), min(len(others), capacity - len(wanted)))
        return len(wanted - cached) + min(rest(step + 1, wanted | frozenset(keep)) for keep in kept)

    return rest(0, frozenset())


@given(
    capacity=st.integers(1, 4),
    lookups=st.lists(st.frozensets(st.integers(0, 6), max_size=4), max_size=9),
)
@settings(max_examples=100)
def test_belady_is_the_optimum(capacity: int, lookups: list[frozenset[int]]) -> None:
    requests = [frozenset(sorted(units)[:capacity]) for units in lookups]
    best = belady([sorted(units) for units in requests], capacity)
    assert best.misses == fewest_misses(requests, capacity)
    for name in NAMES:
        assert replay([sorted(units) for units in requests], capacity, name).hits <= best.hits
