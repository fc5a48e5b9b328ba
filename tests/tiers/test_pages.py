"""Tiers of passages: a unit takes as many slots as its tokens need."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.tiers.policy import POLICIES
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Held, Lease, UnitShape
from support.counting_source import Source, check_slots

MOST, DIM = 11, 2
SHAPE = UnitShape(MOST, DIM, torch.float32, 4)
ONE_SLOT = UnitShape(MOST, DIM, torch.float32, MOST)


def unit(number: int) -> BlockKey:
    return BlockKey(1 if number >= 0 else -1, 0, abs(number), 0)


def content(key: BlockKey) -> Tensor:
    """K and V [2, tokens, DIM] of a unit."""
    length = 1 + (7 * key.block + key.document) % MOST
    draw = torch.Generator().manual_seed(1000 * (key.document + 5) + key.block)
    return torch.randn(2, length, DIM, generator=draw)


class Passages(Source):
    """A source with every passage; it counts them."""

    def __init__(self, shape: UnitShape = SHAPE) -> None:
        self.count, self._shape = 0, shape

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        self.count += len(units)
        lengths = []
        for key, held in zip(units, slots):
            assert len(held) == self._shape.most_slots
            both, size = content(key), self._shape.slot_size
            for at, slot in enumerate(held):
                part = both[:, at * size : (at + 1) * size]
                slab[slot] = 0
                slab[slot, :, : part.shape[1]] = part
            lengths.append(both.shape[1])
        return lengths, ["disk"] * len(units)


def check(lease: Lease, units: Sequence[BlockKey]) -> None:
    rows, keys, values = lease.tokens()
    expected = torch.cat([content(key) for key in units], 1)
    assert torch.equal(torch.stack((rows[keys], rows[values])), expected)
    assert lease.lengths.tolist() == [content(key).shape[1] for key in units]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("lllrrapudfK"), st.integers(0, 23)), max_size=60),
    st.integers(3, 20),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
    st.sampled_from([SHAPE, ONE_SLOT]),
)
def test_any_order_of_calls_preserves_budget_and_content(
    steps: list[tuple[str, int]], slots: int, policy: str, on_device: bool, shape: UnitShape
) -> None:
    """Leases, releases, units that are admitted, pinned, unpinned, dropped and read ahead."""
    below = Passages(shape)
    host = SlabTier("host", below, slots * shape.slot_bytes, shape, policy=policy)
    tier: SlabTier = host
    if on_device:
        budget = 30 * shape.slot_bytes
        tier = SlabTier("device", host, budget, shape, device="cpu", policy=policy)
    leases: list[tuple[Lease, list[BlockKey]]] = []
    pinned: list[BlockKey] = []
    admitted = 0
    for what, number in steps:
        some = [unit((number + i * 5) % 24) for i in range(1 + number % 4)]
        some += some[: number % 2]  # twice
        try:
            if what == "l":
                leases.append((tier.lease(some), some))
            elif what == "r" and leases:
                leases.pop(number % len(leases))[0].release()
            elif what == "a":
                both = content(some[0])
                k, v = torch.nn.functional.pad(both, (0, 0, 0, MOST - both.shape[1]))
                host.admit(some[0], k, v, both.shape[1])
                admitted += 1
            elif what == "p" and not host.holds(key := unit(-1 - number)):
                both = content(key)
                k, v = torch.nn.functional.pad(both, (0, 0, 0, MOST - both.shape[1]))[:, None, None]
                pinned += host.pin(-1, 0, 1 + number, k, v, [both.shape[1]])
            elif what == "u" and pinned:
                host.unpin([pinned.pop(number % len(pinned))])
            elif what == "d":
                tier.drop([unit(number)])
            elif what == "f":
                wanted = [key for key in dict.fromkeys(some) if not tier.holds(key)]
                assert tier.prefetch(some) == sum(map(tier.holds, wanted))
            elif what == "K":
                tier.drop_document(1)
        except BudgetExceeded:
            assert what in "lpf"
        assert host.bytes <= host.budget_bytes and tier.bytes <= tier.budget_bytes
        for lease, units in leases:
            check(lease, units)
        for key in pinned:
            with host.lease([key]) as lease:
                check(lease, [key])
    for lease, _ in leases:
        lease.release()
    check_slots(host), check_slots(tier)
    stats = host.stats()
    ahead = stats.prefetched + stats.late + stats.unused + len(host._table.untouched)
    assert below.count == stats.misses + ahead - admitted
