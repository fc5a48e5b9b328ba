"""Conformance suite of the host and device tiers: leases, pins, budgets, prefetches, drops,
replays.
"""

import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from benchmarks.replay import replay
from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, CorruptBlock, DocumentNotFound
from memstore.kernels.slab_copy import load_units
from memstore.tiers.cascade import Cascade
from memstore.tiers.policy import POLICIES
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Lease
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


class Leasing:
    """A thread that leases units until it is stopped."""

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


Make = Callable[..., SlabTier]


@pytest.fixture(params=["host", "device"])
def make(request: pytest.FixtureRequest, below: CountingSource) -> Make:
    """A tier of `slots` units above `below`: a host tier, or a device tier above one."""

    def tier(units: int = 8, policy: str = "lru") -> SlabTier:
        if request.param == "host":
            return host_tier(below, units, policy)
        return device_tier(host_tier(below, 64), units, policy)

    return tier


# Leases


def test_failed_read_leaves_nothing(make: Make, below: CountingSource) -> None:
    tier = make(units=4)
    check_lease(tier, [unit(0)])
    below.refuse = True
    for _ in range(5):
        with pytest.raises(CorruptBlock):
            tier.lease([unit(0), unit(1), unit(2)])
    below.refuse = False
    assert tier.bytes == UNIT_BYTES
    check_lease(tier, [unit(n) for n in range(4)])
    with pytest.raises(DocumentNotFound):
        tier.lease([BlockKey(666, 0, 0, 0)])
    check_lease(tier, [unit(n) for n in range(4, 8)])


def test_refused_lease_reports_how_many_units_fit(below: CountingSource) -> None:
    tier = host_tier(below, units=4)
    check_lease(tier, [unit(n) for n in range(4)])
    tier.pin(-1, 0, 0, torch.zeros(1, 1, BLOCK, DIM), torch.zeros(1, 1, BLOCK, DIM))
    with pytest.raises(BudgetExceeded, match="raise the host budget") as refused:
        tier.lease([unit(n) for n in range(6)])
    assert refused.value.fits == 3
    assert sum(tier.holds(unit(n)) for n in range(4)) == 3
    check_lease(tier, [unit(4), unit(5), unit(5), unit(4), unit(2)])
    with pytest.raises(BudgetExceeded) as refused:
        tier.lease([BlockKey(-1, 0, 0, 0), *(unit(n) for n in range(4))])
    assert refused.value.fits == 4


# Replay


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replayed_lookups_have_the_hits_and_misses_of_a_tier(
    policy: str, device: str | None, below: CountingSource
) -> None:
    chance = random.Random(policy)
    for capacity in (5, 16, 40):
        tiers = Cascade(
            below,
            SHAPE,
            host_budget=capacity * UNIT_BYTES,
            device_budget=capacity * UNIT_BYTES,
            device=device,
            policy=policy,
        )
        lookups = []
        for step in range(250):
            some = {
                int(chance.paretovariate(0.5)) % 90
                for _ in range(chance.randint(1, min(capacity, 12)))
            }
            lookups.append([unit(number, layer=step % 2) for number in some])
            tiers.top.lease(lookups[-1]).release()
        tiers.close()
        stats, result = tiers.top.stats(), replay(lookups, capacity, policy)
        assert (stats.hits, stats.misses) == (result.hits, result.misses)
        assert result.misses > stats.evictions > 0 and stats.hits > 0
        check_slots(tiers.top)


# Prefetching


def test_lookup_joins_a_late_prefetch(make: Make, below: CountingSource) -> None:
    tier = make()
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
    assert (stats.hits, stats.misses, stats.prefetched, stats.late) == (2, 0, 0, 1)
    assert stats.seconds > 0
    assert below.reads == [[unit(0), unit(1)]]
    check_slots(tier)


@pytest.mark.parametrize("policy", POLICIES)
def test_failed_prefetch_leaves_nothing_and_the_lookup_raises(
    make: Make, below: CountingSource, policy: str
) -> None:
    tier = make(units=3, policy=policy)
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


def test_a_lookup_waits_for_slots_that_are_leased_briefly(below: CountingSource) -> None:
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
    with suppress(BudgetExceeded):  # the pin came before it, and took every slot
        second.end()
    own.end()


# Drops at awkward moments


def test_a_unit_dropped_during_its_read_is_not_cached(make: Make, below: CountingSource) -> None:
    tier = make(units=4)
    below.stand_still()
    ahead = Aside(tier.prefetch, [unit(0), unit(1)])
    others = [unit(4, document=2), unit(5, document=2)]
    lookup = Aside(tier.lease, others)
    below.reading.acquire(), below.reading.acquire()
    Aside(tier.drop_document, 2).end()  # waits for nothing
    Aside(tier.drop, [unit(0)]).end()
    assert tier.bytes == 4 * UNIT_BYTES  # the slots are being written to
    below.go()
    lease = lookup.end()
    assert isinstance(lease, Lease) and ahead.end() == 2
    # leased units do not change
    assert torch.equal(lease.k[lease.slots[0]], content(others[0])[0])
    held = [tier.holds(key) for key in (unit(0), unit(1), *others)]
    assert held == [False, True, False, False]
    assert tier.bytes == 3 * UNIT_BYTES and tier.stats().unused == 1
    lease.release()
    assert tier.bytes == UNIT_BYTES
    check_slots(tier)


# A tier over a tier


def test_host_slot_is_leased_until_its_copy_is_done(
    below: CountingSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        """A copy that is made as late as it may be: when somebody waits for it."""

        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def synchronize(self) -> None:
            assert set(self._arguments[2]) <= host._table.leases.keys()
            load_units(*self._arguments)

    monkeypatch.setattr("memstore.tiers.slab.load_units", Late)
    host = host_tier(below, 3)
    device = device_tier(host, 8)
    for first in range(0, 30, 5):
        check_lease(device, [unit(n) for n in range(first, first + 8)])
    check_slots(device), check_slots(host)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")
def test_ctrl_c_releases_every_lock(below: CountingSource) -> None:
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
