"""What host and device tier share: replay equals life, prefetches, and drops at awkward
moments.
"""

import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, CorruptBlock, DocumentNotFound, InvalidConfig
from memstore.kernels.slab_copy import load_units
from memstore.tiers.cascade import Cascade
from memstore.tiers.device_tier import DeviceTier
from memstore.tiers.host_tier import HostTier
from memstore.tiers.lease import Lease
from memstore.tiers.lookup_trace import read_trace
from memstore.tiers.policy import POLICIES
from memstore.tiers.replay import replay
from memstore.tiers.slab import SlabTier
from support.counting_source import (
    BLOCK,
    DIM,
    SECONDS,
    SHAPE,
    UNIT_BYTES,
    Aside,
    CountingSource,
    check_lease,
    check_slots,
    content,
    device_tier,
    host_tier,
    unit,
)
from support.fake_device import FakeDevice


class Leasing:
    """A thread that leases units until it is told to end."""

    def __init__(self, tier: SlabTier, units: list[BlockKey]) -> None:
        self._has, self._enough = threading.Event(), threading.Event()
        self._thread = Aside(self._lease, tier, units)

    def _lease(self, tier: SlabTier, units: list[BlockKey]) -> None:
        with tier.lease(units):
            self._has.set()
            assert self._enough.wait(SECONDS)

    def leases(self, seconds: float = SECONDS) -> bool:
        return self._has.wait(seconds)

    def end(self) -> None:
        self._enough.set()
        self._thread.end()


# The four policies, alive and replayed


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_lookups_replayed_from_their_trace_hit_and_miss_as_they_did(
    policy: str, device: str | None, below: CountingSource, tmp_path: Path
) -> None:
    chance = random.Random(policy)
    for capacity in (5, 16, 40):
        path = tmp_path / str(capacity)
        tiers = Cascade(
            None,
            SHAPE,
            host_budget=capacity * UNIT_BYTES,
            device_budget=capacity * UNIT_BYTES,
            device=device,
            policy=policy,
            trace=path,
        )
        tiers.host.source = below
        for step in range(250):
            some = {
                int(chance.paretovariate(0.5)) % 90
                for _ in range(chance.randint(1, min(capacity, 12)))
            }
            with tiers.lease([unit(number, layer=step % 2) for number in some]):
                pass
        tiers.close()
        lookups = [entry for entry in read_trace(path) if entry.is_lookup]
        stats, result = (
            tiers.top.stats(),
            replay([entry.units for entry in lookups], capacity, policy),
        )
        assert (stats.hits, stats.misses, stats.evictions) == (
            result.hits,
            result.misses,
            result.evictions,
        )
        assert sum(len(entry.missed) for entry in lookups) == result.misses > result.evictions > 0
        assert stats.hits > 0
        check_slots(tiers.top)


# Prefetching


def test_a_unit_prefetched_in_time_is_a_hit_and_counted_once(below: CountingSource) -> None:
    tier = host_tier(below)
    assert tier.prefetch([unit(0), unit(1), unit(0), unit(2, layer=4)]) == 3
    assert tier.prefetch([unit(1), unit(0)]) == 0
    check_lease(tier, [unit(0), unit(5)])
    check_lease(tier, [unit(0), unit(2, layer=4)])
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.prefetched, stats.late, stats.unused) == (3, 1, 2, 0, 0)
    assert tier.layers()[4].prefetched == 1
    assert sum(map(len, below.reads)) == 4
    check_slots(tier)


def test_a_late_prefetch_is_joined_and_not_read_twice(below: CountingSource) -> None:
    tier = host_tier(below)
    below.stand_still()
    ahead = Aside(tier.prefetch, [unit(0), unit(1)])
    below.reading.acquire()
    lookups = [Aside(check_lease, tier, [unit(0)]) for _ in range(2)]
    assert tier.prefetch([unit(1)]) == 0
    assert all(lookup.is_waiting() for lookup in lookups)
    below.go()
    assert ahead.end() == 2
    for lookup in lookups:
        lookup.end()
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.prefetched, stats.late) == (
        2,
        0,
        0,
        1,
    ) and stats.seconds > 0
    assert below.reads == [[unit(0), unit(1)]]
    check_slots(tier)


def test_prefetched_units_that_nobody_looked_up_are_counted_when_they_go(
    below: CountingSource,
) -> None:
    tier = host_tier(below, units=4)
    tier.prefetch([unit(n) for n in range(4)])
    for number in (0, 0, 4):  # the first use counts as the unit's arrival, the second as a use
        check_lease(tier, [unit(number)])
    assert (tier.stats().evictions, tier.stats().unused) == (1, 1)
    tier.drop([unit(2)])
    tier.drop_document(1)
    stats = tier.stats()
    assert (stats.prefetched, stats.late, stats.unused) == (1, 0, 3)
    assert tier.bytes == 0
    check_slots(tier)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefetch_takes_neither_leased_nor_pinned_slots_and_no_budget_stops_it(
    below: CountingSource, policy: str
) -> None:
    tier = host_tier(below, units=4, policy=policy)
    k = torch.zeros(1, 1, BLOCK, DIM)
    tier.pin(-1, 0, 0, k, k)
    lease = tier.lease([unit(0), unit(1)])
    assert tier.prefetch([unit(n) for n in range(20)]) == 1
    assert tier.prefetch([unit(n) for n in range(20, 30)]) == 1
    assert tier.holds(BlockKey(-1, 0, 0, 0)) and tier.holds(unit(0)) and tier.holds(unit(1))
    other = tier.lease([unit(40)])
    assert tier.prefetch([unit(50)]) == 0
    assert torch.equal(lease.k[lease.slots[1]], content(unit(1))[0])
    lease.release(), other.release()
    assert tier.bytes == 4 * UNIT_BYTES
    check_slots(tier)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_prefetch_leaves_nothing_behind_and_the_lookup_raises_the_named_error(
    below: CountingSource, policy: str
) -> None:
    tier = host_tier(below, units=3, policy=policy)
    below.refuse = True
    for _ in range(3):
        with pytest.raises(CorruptBlock):
            tier.prefetch([unit(0), unit(1)])
    assert tier.bytes == 0 and not tier.holds(unit(0))
    with pytest.raises(DocumentNotFound):
        below.refuse = False
        tier.prefetch([unit(2), BlockKey(666, 0, 0, 0)])
    below.refuse = True
    with pytest.raises(CorruptBlock, match="document 1, block 0"):
        tier.lease([unit(0)])
    below.refuse = False
    check_lease(tier, [unit(0), unit(1), unit(2)])
    assert (tier.stats().prefetched, tier.stats().unused) == (0, 0)
    check_slots(tier)


def test_a_lookup_waits_for_the_room_that_prefetches_and_other_threads_take_for_a_moment(
    below: CountingSource,
) -> None:
    tier = host_tier(below, units=2)
    below.stand_still()
    ahead = Aside(tier.prefetch, [unit(0), unit(1)])
    below.reading.acquire()
    lookup = Leasing(tier, [unit(5), unit(6)])
    assert not lookup.leases(0.05)
    assert tier.prefetch([unit(7)]) == 0
    below.go()
    assert lookup.leases() and ahead.end() == 2
    assert tier.stats().unused == 2

    second = Aside(check_lease, tier, [unit(5), unit(7)])
    own = Aside(tier.pin, -1, 0, 0, *(torch.zeros(2, 1, BLOCK, DIM) for _ in range(2)))
    assert second.is_waiting() and own.is_waiting()
    with pytest.raises(BudgetExceeded) as refused:  # more than there will ever be
        tier.lease([unit(8), unit(9), unit(10)])
    assert refused.value.fits == 0
    lookup.end()
    outcomes = []
    for call in (second, own):
        try:
            call.end()
            outcomes.append("done")
        except BudgetExceeded:
            outcomes.append("refused")
    assert outcomes[1] == "done"  # the lookup came before it, or found everything pinned


def test_a_thread_that_leases_does_not_wait_for_others(below: CountingSource) -> None:
    tier = host_tier(below, units=3)
    other = Leasing(tier, [unit(0)])
    assert other.leases()
    with tier.lease([unit(1)]), pytest.raises(BudgetExceeded) as refused:
        tier.lease([unit(2), unit(3)])
    assert refused.value.fits == 1
    other.end()
    check_lease(tier, [unit(2), unit(3), unit(1)])
    check_slots(tier)


def test_waiting_for_room_ends(below: CountingSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlabTier, "patience", 0.05)
    tier = host_tier(below, units=3)
    endless = Leasing(tier, [unit(0)])
    assert endless.leases()
    with pytest.raises(BudgetExceeded, match="raise the host budget"):
        tier.lease([unit(1), unit(2), unit(3)])
    with pytest.raises(BudgetExceeded):
        tier.pin(-1, 0, 0, *(torch.zeros(3, 1, BLOCK, DIM) for _ in range(2)))
    endless.end()
    check_slots(tier)


# Drops at awkward moments


def test_a_unit_dropped_on_its_way_is_not_held_when_it_arrives(below: CountingSource) -> None:
    tier = host_tier(below, units=4)
    below.stand_still()
    ahead = Aside(tier.prefetch, [unit(0), unit(1)])
    lookup = Aside(tier.lease, [unit(4), unit(5)])
    below.reading.acquire(), below.reading.acquire()
    Aside(tier.drop_document, 1, 2).end()  # waits for nothing
    Aside(tier.drop, [unit(0)]).end()
    assert tier.bytes == 4 * UNIT_BYTES  # the slots are being written to
    below.go()
    lease = lookup.end()
    assert isinstance(lease, Lease) and ahead.end() == 2
    # what is leased stays as it is
    assert torch.equal(lease.k[lease.slots[0]], content(unit(4))[0])
    assert [tier.holds(unit(n)) for n in (0, 1, 4, 5)] == [False, True, False, False]
    assert tier.bytes == 3 * UNIT_BYTES and tier.stats().unused == 1
    lease.release()
    assert tier.bytes == UNIT_BYTES
    check_slots(tier)


def test_a_unit_dropped_on_its_way_is_read_anew_for_who_asks_later(below: CountingSource) -> None:
    tier = host_tier(below, units=4)
    below.stand_still()
    first = Aside(tier.prefetch, [unit(0)])
    below.reading.acquire()
    joined = Aside(check_lease, tier, [unit(0)])
    assert joined.is_waiting()
    tier.drop([unit(0)])
    below.reading.acquire()  # the joined lookup does not wait for what was dropped
    below.go()
    joined.end(), first.end()
    assert tier.holds(unit(0)) and below.reads == [[unit(0)], [unit(0)]]
    assert (tier.stats().misses, tier.stats().unused, tier.stats().late) == (1, 1, 0)
    check_slots(tier)


@pytest.mark.parametrize("what", ["lease", "prefetch"])
def test_a_unit_dropped_on_its_way_to_a_failure_leaves_nothing(
    below: CountingSource, what: str
) -> None:
    tier = host_tier(below, units=2)
    below.stand_still()
    below.refuse = True
    call = Aside(getattr(tier, what), [unit(0), unit(1)])
    below.reading.acquire()
    tier.drop([unit(0)])
    below.go()
    with pytest.raises(CorruptBlock):
        call.end()
    assert tier.bytes == 0
    check_slots(tier)


# Any order of calls


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from("llrrpudfK"), st.integers(0, 23)), max_size=60),
    st.integers(1, 9),
    st.sampled_from(sorted(POLICIES)),
)
def test_any_order_of_calls_keeps_budget_and_content(
    steps: list[tuple[str, int]], capacity: int, policy: str
) -> None:
    below = CountingSource()
    tier = host_tier(below, units=capacity, policy=policy)
    leases: list[tuple[Lease, list[BlockKey]]] = []
    pinned: list[BlockKey] = []
    for what, number in steps:
        some = [unit((number + i * 5) % 24) for i in range(1 + number % 4)]
        try:
            if what == "l":
                leases.append((tier.lease(some), some))
            elif what == "r" and leases:
                leases.pop(number % len(leases))[0].release()
            elif what == "p" and not tier.holds(key := BlockKey(-1, 0, number, 0)):
                k, v = content(key)
                pinned += tier.pin(
                    -1, 0, number, k.view(1, 1, BLOCK, DIM), v.view(1, 1, BLOCK, DIM)
                )
            elif what == "u" and pinned:
                tier.unpin([pinned.pop(number % len(pinned))])
            elif what == "d":
                tier.drop([unit(number)])
            elif what == "f":
                wanted = [key for key in some if not tier.holds(key)]
                assert tier.prefetch(some) == sum(map(tier.holds, wanted))
            elif what == "K":
                tier.drop_document(1, number)
        except BudgetExceeded as refused:
            assert what in "lp"
            assert refused.fits < max(len(set(some)), 1)
        assert tier.bytes <= capacity * UNIT_BYTES
        for lease, wanted in leases:
            for slot, key in zip(lease.slots, wanted):
                assert torch.equal(lease.k[slot], content(key)[0])
        assert all(tier.holds(key) for key in pinned)
    for lease, _ in leases:
        lease.release()
    check_slots(tier)
    stats = tier.stats()
    ahead = stats.prefetched + stats.late + stats.unused + len(tier._table.untouched)
    assert sum(map(len, below.reads)) == stats.misses + ahead


# A tier over a tier


def make_pair(
    below: CountingSource, device_units: int, host_units: int
) -> tuple[DeviceTier, HostTier]:
    host = host_tier(below, host_units)
    return device_tier(host, device_units), host


def test_what_the_device_misses_the_host_is_asked_for_layer_by_layer(below: CountingSource) -> None:
    device, host = make_pair(below, 8, 30)
    check_lease(device, [unit(n, layer=2) for n in range(6)])
    device.prefetch([unit(n, layer=n % 3) for n in range(6)])
    for number in range(40):
        check_lease(device, [unit(number, layer=1), unit(number // 2, layer=1)])
    asked = {layer: stats.hits + stats.misses for layer, stats in host.layers().items()}
    for layer, stats in device.layers().items():
        read_ahead = 2 if layer < 2 else 0  # of layer 2, everything was there already
        assert asked[layer] == stats.misses + read_ahead, layer
    assert host.stats().misses == sum(map(len, below.reads))
    check_slots(device), check_slots(host)


@pytest.mark.parametrize("host_units", [1, 2, 3, 7])
def test_a_host_smaller_than_the_device_passes_everything_up(
    below: CountingSource, host_units: int
) -> None:
    device, host = make_pair(below, 20, host_units)
    k = torch.zeros(host_units - 1, 1, BLOCK, DIM)
    host.pin(-1, 0, 0, k, k)
    for first in range(0, 40, 9):
        check_lease(device, [unit(n) for n in range(first, first + 20)])
    assert host.bytes <= host_units * UNIT_BYTES and device.bytes == 20 * UNIT_BYTES
    host.pin(-1, 1, 0, k[:1].new_zeros(1, 1, BLOCK, DIM), k.new_zeros(1, 1, BLOCK, DIM))
    with pytest.raises(BudgetExceeded, match="raise the host budget"):
        device.lease([unit(100)])
    check_slots(device), check_slots(host)


def test_a_host_slot_is_not_let_go_before_the_copy_to_the_device_is_done(
    below: CountingSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        """A copy that is made as late as it may be: when somebody waits for it."""

        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def finish(self) -> None:
            assert set(self._arguments[2]) <= host._table.leases.keys()
            load_units(*self._arguments).finish()

    monkeypatch.setattr("memstore.tiers.host_tier.load_units", Late)
    device, host = make_pair(below, 8, 3)
    for first in range(0, 30, 5):
        check_lease(device, [unit(n) for n in range(first, first + 8)])
    check_slots(device), check_slots(host)


def test_slots_and_lengths_on_another_device_are_those_of_the_units(below: CountingSource) -> None:
    with FakeDevice():
        host = host_tier(below, 5)
        device = device_tier(host, 8, device="cuda")
        assert device.slab.device.type == device.lengths.device.type == "cuda"
        for first in range(0, 40, 3):
            units = [unit(n) for n in range(first, first + 8)]
            with device.lease(units) as lease:
                expected = torch.stack([torch.stack(content(key)) for key in units])
                assert torch.equal(device.slab[lease.slots].cpu(), expected)
                assert lease.lengths.tolist() == [BLOCK - key.block % 2 for key in units]
                assert device.lengths[lease.slots].tolist() == lease.lengths.tolist()
                assert lease.lengths.device.type == "cpu"
        check_slots(device), check_slots(host)


def test_many_threads_share_a_device_tier_over_a_host_of_one_unit(below: CountingSource) -> None:
    device, host = make_pair(below, 12, 1)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            numbers = chance.sample(range(40), 4)
            if chance.random() < 0.3:
                device.prefetch([unit(n) for n in numbers])
            else:
                check_lease(device, [unit(n) for n in numbers])

    for call in [Aside(work, seed) for seed in range(6)]:
        call.end()
    check_slots(device), check_slots(host)


BAD_DEVICES = ["nonsense", "", "cuda:99", "meta", "hpu", "mps", "privateuseone"]


@pytest.mark.parametrize("device", BAD_DEVICES)
def test_a_device_that_is_not_there_is_refused_in_one_line(
    below: CountingSource, device: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        device_tier(host_tier(below), 8, device=device)
    words = str(refused.value)
    assert repr(device) in words and "\n" not in words and len(words) < 300


def test_a_device_budget_below_one_unit_is_refused_with_its_name(below: CountingSource) -> None:
    make: Callable[[int], SlabTier] = lambda budget: DeviceTier(  # noqa: E731
        host_tier(below), budget, SHAPE, device="cpu"
    )
    with pytest.raises(BudgetExceeded, match="device budget of 10 bytes"):
        make(10)
    with pytest.raises(BudgetExceeded, match=r"device budget .* lower the budget"):
        make(1 << 60)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")
def test_an_interrupt_leaves_no_lock_taken(below: CountingSource) -> None:
    """Ctrl-C at any instant: the writer's thread has to get at the tier when the main thread closes
    the document.
    """
    tier = host_tier(below)
    free = ThreadPoolExecutor(1)

    def taken() -> bool:
        got = tier._lock.acquire(timeout=SECONDS)
        if got:
            tier._lock.release()
        return not got

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 5e-5 + turn % 7 * 1e-5)
                while True:
                    tier.unpin([])
            except KeyboardInterrupt:
                pass
            if turn % 50 == 49:
                assert not free.submit(taken).result()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        free.shutdown()
