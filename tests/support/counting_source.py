"""A source of units under a tier, without a disk: it counts reads; it can be slow or fail."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import ClassVar

import torch

from memstore.block import BlockKey
from memstore.errors import CorruptBlock, DocumentNotFound
from memstore.share.parallel import begin
from memstore.tiers.slab import SlabTier
from memstore.tiers.slots import Held, LowestTier, TierCounter, UnitShape

BLOCK, DIM = 4, 8
UNIT_BYTES = 2 * BLOCK * DIM * 4
SHAPE = UnitShape(BLOCK, DIM, torch.float32, BLOCK)
SECONDS = 600  # until a test that waits has failed


def unit(number: int, layer: int = 0, document: int = 1) -> BlockKey:
    return BlockKey(document, layer, number // 2, number % 2)


def content(key: BlockKey) -> tuple[torch.Tensor, torch.Tensor]:
    """The K and V that a unit has everywhere in these tests."""
    seed = ((key.document + 100) * 31 + key.layer) * 100_003 + key.block * 7 + key.head
    both = torch.randn(2, BLOCK, DIM, generator=torch.Generator().manual_seed(seed))
    return both[0], both[1]


class Source:
    """A LowestTier without threads or counts."""

    counters: ClassVar[dict[str, TierCounter]] = {}

    def close(self) -> None:
        pass


class Delayed(Source):
    """A source above another one that does something before every read."""

    def __init__(self, source: LowestTier, before: Callable[[], object]) -> None:
        self._source, self._before = source, before

    def read_from(
        self, units: Sequence[BlockKey], slab: torch.Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        self._before()
        return self._source.read_from(units, slab, slots)


class CountingSource(Source):
    """A source with every block of every document above 0 but 666, that counts what is read and can
    refuse.
    """

    def __init__(self) -> None:
        self.reads: list[list[BlockKey]] = []
        self.refuse = False
        self.error: Callable[[], BaseException] = lambda: CorruptBlock(
            "document 1, block 0, layer 0 is damaged"
        )
        self.wild: random.Random | None = None  # fails and dawdles now and then
        self.reading = threading.Semaphore(0)  # reads that have begun
        self._go = threading.Event()
        self._go.set()

    def stand_still(self) -> None:
        """Reads that begin from now on wait for `go`."""
        self._go.clear()

    def go(self) -> None:
        """Let them go on."""
        self._go.set()

    def read_from(
        self, units: Sequence[BlockKey], slab: torch.Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        self.reads.append(list(units))
        self.reading.release()
        assert self._go.wait(SECONDS), "nobody said go"
        if self.refuse:
            raise self.error()
        if self.wild is not None:
            time.sleep(self.wild.random() * 0.002)
            if self.wild.random() < 0.1:
                raise self.wild.choice(
                    [OSError(5, "Input/output error"), CorruptBlock("damaged"), RuntimeError("?")]
                )
        assert len(set(slots)) == len(slots)
        for key, (slot,) in zip(units, slots):
            if key.document == 666:
                raise DocumentNotFound("document 666 was forgotten")
            slab[slot] = torch.stack(content(key))
        return [BLOCK - key.block % 2 for key in units], ["disk"] * len(units)


def host_tier(below: LowestTier, units: int = 8, policy: str = "lru") -> SlabTier:
    """A host tier of `units` units, whose budget is half a unit larger."""
    return SlabTier("host", below, units * UNIT_BYTES + UNIT_BYTES // 2, SHAPE, policy=policy)


def device_tier(host: SlabTier, units: int, policy: str = "lru", device: str = "cpu") -> SlabTier:
    """A device tier of `units` units above a host tier."""
    return SlabTier("device", host, units * UNIT_BYTES, SHAPE, policy=policy, device=device)


def check_lease(tier: SlabTier, units: list[BlockKey]) -> None:
    with tier.lease(units) as lease:
        for place, key in enumerate(units):
            k, v = content(key)
            slot = lease.slots[place]
            assert torch.equal(lease.k[slot], k) and torch.equal(lease.v[slot], v), key
            assert lease.lengths[place] == BLOCK - key.block % 2 == tier.lengths[slot]


def check_slots(tier: SlabTier) -> None:
    """Every slot is in use once or free, and nothing is on its way, leased or waited for."""
    table = tier._table
    with tier._lock:
        used = [slot for held in table.slots.values() for slot in held]
        everything = used + table.free + list(range(table.fresh, table.capacity))
        assert sorted(everything) == list(range(table.capacity))
        assert all(table.units[held[-1]] == unit for unit, held in table.slots.items())
        assert table.pinned_slots == sum(len(table.slots[unit]) for unit in table.pinned)
        assert set(table.slots) == set(table.units.values()) and table.units.keys() == set(used)
        assert not (
            tier._arriving or tier._predicted or table.leases or tier._lessees or table.orphans
        )
        assert tier._ahead == tier._short == 0
        assert len(table.policy) + len(table.pinned) == len(table.slots)
        assert all((unit in table.policy) != (unit in table.pinned) for unit in table.slots)
        assert table.untouched <= table.slots.keys()
        assert table.fresh <= table.capacity


class Aside:
    """A call in a thread of its own, whose end or error the test waits for."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        (self._future,) = begin(lambda _: call(*arguments), [None])

    def is_waiting(self, seconds: float = 0.05) -> bool:
        """Is it still under way after a moment?"""
        return bool(wait([self._future], seconds).not_done)

    def end(self) -> object:
        """Its result, or its error; TimeoutError if it waits forever."""
        return self._future.result(SECONDS)
