"""The host tier: an exact byte budget, least recently used first, leases and pins that hold, many
threads at once.
"""

import random
import threading

import pytest
import torch

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, CorruptBlock, DocumentNotFound
from memstore.tiers.host_tier import HostTier, NoSource
from support.counting_source import (
    BLOCK,
    DIM,
    SHAPE,
    UNIT_BYTES,
    CountingSource,
    check_lease,
    content,
    host_tier,
    unit,
)


def test_hits_are_not_read_again_and_are_counted(below: CountingSource) -> None:
    tier = host_tier(below)
    check_lease(tier, [unit(0), unit(1), unit(5)])
    check_lease(tier, [unit(5), unit(0)])
    check_lease(tier, [unit(5), unit(2), unit(5)])
    assert below.reads == [[unit(0), unit(1), unit(5)], [unit(2)]]
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.evictions) == (4, 4, 0)
    assert stats.bytes == 8 * UNIT_BYTES and stats.seconds > 0
    check_lease(tier, [unit(0, layer=3)])
    assert tier.layers()[3].misses == 1 and tier.layers()[0].misses == 4
    assert tier.bytes == 5 * UNIT_BYTES


def test_empty_lease_is_no_read(below: CountingSource) -> None:
    tier = host_tier(below)
    with tier.lease([]) as lease:
        assert lease.slots.shape == (0,) and lease.lengths.shape == (0,)
    assert below.reads == [] and tier.stats().misses == 0


def test_least_recently_used_goes_first(below: CountingSource) -> None:
    tier = host_tier(below, units=3)
    for number in (0, 1, 2, 0, 3):
        check_lease(tier, [unit(number)])
    assert [tier.holds(unit(n)) for n in range(4)] == [True, False, True, True]
    assert tier.stats().evictions == 1


def test_leased_units_stay_until_release(below: CountingSource) -> None:
    tier = host_tier(below, units=3)
    first = tier.lease([unit(0), unit(1)])
    for number in range(2, 8):
        check_lease(tier, [unit(number)])
    assert tier.holds(unit(0)) and tier.holds(unit(1))
    assert torch.equal(first.k[first.slots[1]], content(unit(1))[0])
    with pytest.raises(BudgetExceeded) as refused:
        tier.lease([unit(8), unit(9)])
    assert refused.value.fits == 1
    first.release()
    first.release()
    check_lease(tier, [unit(8), unit(9), unit(10)])


def test_too_many_units_say_how_many_would_fit_and_change_nothing(below: CountingSource) -> None:
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


def test_budget_below_one_unit_is_refused(below: CountingSource) -> None:
    with pytest.raises(BudgetExceeded, match="raise the budget"):
        HostTier(below, UNIT_BYTES - 1, SHAPE)


def test_failed_read_leaves_nothing_behind(below: CountingSource) -> None:
    tier = host_tier(below, units=4)
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


def test_pinned_units_outlive_any_pressure_and_are_cached_after_unpin(
    below: CountingSource,
) -> None:
    tier = host_tier(below, units=6)
    own = torch.randn(2, 2, 2, BLOCK, DIM)
    pinned = tier.pin(1, 0, 10, own[0], own[1], lengths=[BLOCK, 3])
    assert pinned == [BlockKey(1, 0, block, head) for block in (10, 11) for head in (0, 1)]
    for number in range(10):
        check_lease(tier, [unit(number)])
    with tier.lease(pinned) as lease:
        assert lease.lengths.tolist() == [BLOCK, BLOCK, 3, 3]
        assert torch.equal(lease.k[lease.slots].view(2, 2, BLOCK, DIM), own[0])
        assert torch.equal(lease.v[lease.slots].view(2, 2, BLOCK, DIM), own[1])
    assert tier.stats().evictions == 8
    with pytest.raises(BudgetExceeded):
        tier.pin(1, 0, 20, torch.zeros(2, 2, BLOCK, DIM), torch.zeros(2, 2, BLOCK, DIM))
    assert not tier.holds(BlockKey(1, 0, 20, 0))
    tier.unpin(pinned)
    for number in range(10):
        check_lease(tier, [unit(number)])
    assert not any(tier.holds(key) for key in pinned)


def test_dropped_unit_keeps_its_slot_while_leased(below: CountingSource) -> None:
    tier = host_tier(below, units=3)
    lease = tier.lease([unit(0), unit(1)])
    tier.drop_document(1)
    assert not tier.holds(unit(0)) and tier.bytes == 2 * UNIT_BYTES
    for number in range(4, 8):
        check_lease(tier, [unit(number)])
    assert torch.equal(lease.k[lease.slots[0]], content(unit(0))[0])
    lease.release()
    assert tier.bytes == UNIT_BYTES
    check_lease(tier, [unit(0), unit(1), unit(2)])
    tier.drop_document(1, first_block=1)
    assert [tier.holds(unit(n)) for n in range(3)] == [True, True, False]
    tier.drop([unit(1), unit(99)])
    assert not tier.holds(unit(1))


def test_no_source_says_what_is_missing() -> None:
    tier = HostTier(NoSource(), 10 * UNIT_BYTES, SHAPE)
    with pytest.raises(DocumentNotFound, match="document 1"):
        tier.lease([unit(0)])


def test_threads_share_the_tier_and_join_each_others_reads(below: CountingSource) -> None:
    tier = host_tier(below, units=40)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            wanted = rng.sample([unit(n) for n in range(60)], 8)
            with tier.lease(wanted) as lease:
                for place, key in enumerate(wanted):
                    if not torch.equal(lease.v[lease.slots[place]], content(key)[1]):
                        failures.append(f"{key}")
            if rng.random() < 0.05:
                tier.drop_document(1, first_block=25)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert tier.bytes <= 40 * UNIT_BYTES
    stats = tier.stats()
    assert stats.hits + stats.misses == 4 * 150 * 8
    assert stats.misses == sum(map(len, below.reads))
