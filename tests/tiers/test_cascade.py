"""Device, host and disk as one: the same answers with a device tier as without, and every budget
exact.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.tables.catalog import Catalog
from memstore.errors import BudgetExceeded, DocumentNotFound, InvalidConfig, InvalidInput
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.store.memory_store import MemoryStore
from memstore.tiers.cascade import Cascade
from memstore.tiers.policy import POLICIES
from memstore.tiers.slots import Held, LowestTier
from support.counting_source import (
    SECONDS,
    SHAPE,
    UNIT_BYTES,
    Aside,
    CountingSource,
    Source,
    check_lease,
    check_slots,
    unit,
)
from support.rounding import TINY_MODEL, assert_same_to_rounding
from support.synthetic_documents import BLOCK as TOKENS_A_BLOCK
from support.synthetic_documents import CHUNK, HEADS, SIGNATURE, check_content, ingest
from support.synthetic_documents import DIM as STORED_DIM
from support.tiny_model import text, tiny_model

BLOCK_BYTES = 2 * TOKENS_A_BLOCK * STORED_DIM * 2  # of one KV head, as in `deterministic`
TINY_BYTES = 2 * 8 * 8 * 2  # of one KV head of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LandmarkModel:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=3, cmt_cutoff=0.0)


@pytest.fixture(scope="module")
def memory(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of one document; nothing writes to it."""
    path = tmp_path_factory.mktemp("memory") / "m"
    with MemoryStore.create(path, model.signature) as store:
        model.ingest(text(300), store, name="a")
    return path


def check_tiers(store: MemoryStore) -> None:
    """No tier holds more than its budget, and what the device did not have the host was asked
    for.
    """
    tiers = store.tiers
    for tier in tiers.caches:
        assert tier.bytes <= tier.budget_bytes
    if tiers.device is not None:
        stats, below = tiers.device.stats(), tiers.host.stats()
        ahead = stats.prefetched + stats.late + stats.unused
        ahead += len(tiers.device._table.untouched)
        assert stats.misses + ahead == below.hits + below.misses


def logits(model: LandmarkModel, store: MemoryStore, seed: int = 4) -> torch.Tensor:
    with model.session(store) as session:
        # several chunks: the session has blocks of its own
        ids = model.tokenizer.encode(text(20, seed=seed))
        states = [session.feed(ids[:-8])]
        for token in ids[-8:]:
            states.append(session.feed([token]))
            store.tiers.settle()
            check_tiers(store)
        return session.logits(torch.cat(states))


# Answers


@pytest.mark.parametrize("prefetch", ["off", "speculative"])
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_through_a_device_tier_are_the_same(
    model: LandmarkModel, memory: Path, policy: str, prefetch: str
) -> None:
    with MemoryStore.open(memory, model.signature) as store:
        expected = logits(model, store)
    least = 3 * 2 * (4 + 3) * TINY_BYTES  # what a session pins of its own
    for host, device in ((least + TINY_BYTES, 1 << 20), (1 << 20, 1 << 20)):
        options = {
            "host_budget": host,
            "device_budget": device,
            "policy": policy,
            "prefetch": prefetch,
        }
        with MemoryStore.open(memory, model.signature, device="cpu", **options) as store:
            assert_same_to_rounding(logits(model, store), expected, products=TINY_MODEL)
            assert set(store.stats()["tiers"]) == {"device", "host", "disk"}
            check_slots(store.tiers.device), check_slots(store.tiers.host)
    options = {
        "host_budget": least + TINY_BYTES,
        "device_budget": 12 * TINY_BYTES,
        "policy": policy,
    }
    with MemoryStore.open(
        memory, model.signature, device="cpu", prefetch=prefetch, **options
    ) as store:
        # steps are split
        torch.testing.assert_close(logits(model, store), expected, rtol=1e-4, atol=1e-4)
        assert store.stats()["tiers"]["device"]["evictions"]


# Documents come and go


def open_with_device(
    path: Path, host: int = 40, device: int = 60, **options: object
) -> MemoryStore:
    budgets = {
        "host_budget": host * HEADS * BLOCK_BYTES,
        "device_budget": device * HEADS * BLOCK_BYTES,
    }
    return MemoryStore.open(path, SIGNATURE, device="cpu", **{**budgets, **options})


def test_written_replaced_and_forgotten_documents_read_right_through_the_device(
    tmp_path: Path,
) -> None:
    MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    with open_with_device(tmp_path / "m") as store:
        document = ingest(store, "book", 3 * CHUNK + 5)
        check_content(store, document, text=1)
        other = ingest(store, "other", CHUNK, text=2)
        check_content(store, other, text=2)
        document = ingest(store, "book", 5 * CHUNK + 2, mode="replace")
        check_content(store, document, text=1)
        unit = BlockKey(document.id, 1, 3, 0)
        with store.lease([unit]):
            pass
        assert store.tiers.device.holds(unit)
        store.forget("book")
        for tier in store.tiers.caches:
            assert {key.document for key in tier._table.slots} <= {other.id}
        with pytest.raises(DocumentNotFound):
            store.lease([unit])
        check_content(store, other, text=2)
        check_tiers(store)
        check_slots(store.tiers.device), check_slots(store.tiers.host)
    with open_with_device(tmp_path / "m", host=1, device=1) as store:
        check_content(store, other, text=2)


def test_a_lookup_during_a_drop_brings_nothing_back_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets = {"host_budget": 8 * UNIT_BYTES, "device_budget": 8 * UNIT_BYTES}
    tiers = Cascade(CountingSource(), SHAPE, device="cpu", **budgets)
    for drop in ("drop", "drop_document"):
        inner = getattr(tiers.host, drop)

        def look_up_first(*arguments: object, inner: object = inner) -> None:
            tiers.device.drop([unit(0)])
            check_lease(tiers.device, [unit(0)])
            inner(*arguments)

        monkeypatch.setattr(tiers.host, drop, look_up_first)
    check_lease(tiers.device, [unit(0)])
    tiers.drop([unit(0)])
    assert not tiers.device.holds(unit(0)) and not tiers.host.holds(unit(0))
    check_lease(tiers.device, [unit(0)])
    tiers.drop_document(1)
    assert not tiers.device.holds(unit(0)) and not tiers.host.holds(unit(0))


def test_a_sessions_own_blocks_reach_the_device_and_vanish_with_it(
    model: LandmarkModel, memory: Path
) -> None:
    with MemoryStore.open(memory, model.signature, device="cpu", device_budget=1 << 20) as store:
        with model.session(store) as session:
            session.feed(model.tokenizer.encode(text(60, seed=4)))
            own = {unit for unit in store.tiers.device._table.slots if unit.document < 0}
            assert own and all(store.tiers.host.holds(unit) for unit in own)
            assert store.tiers.host._table.pinned
        for tier in store.tiers.caches:
            assert (
                not [unit for unit in tier._table.slots if unit.document < 0]
                and not tier._table.pinned
            )
        check_slots(store.tiers.device), check_slots(store.tiers.host)


class Standing(Source):
    """The source below, which reads when it is told to."""

    def __init__(self, source: LowestTier) -> None:
        self._source = source
        self.reading, self.go = threading.Event(), threading.Event()

    def read_from(
        self, units: Sequence[BlockKey], slab: torch.Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        self.reading.set()
        assert self.go.wait(SECONDS)
        return self._source.read_from(units, slab, slots)


def test_a_document_forgotten_while_it_is_read_ahead_keeps_nobody_waiting_though_the_map_grows(
    tmp_path: Path,
) -> None:
    """A reader's snapshot, the change of the map that waits for it, and the prefetch that waits for
    that: no circle.
    """
    with (
        MemoryStore.create(tmp_path / "m", SIGNATURE) as store,
        MemoryStore.open(tmp_path / "m") as other,
    ):
        document = ingest(store, "book", 2 * CHUNK)
        kept = ingest(store, "kept", 2 * CHUNK, text=2)
        below = store.tiers.host.source = Standing(store.tiers.host.source)
        gate = Catalog.open(tmp_path / "m").database._environment._gate

        def change_the_map() -> None:
            with gate.alone():
                pass

        ahead = Aside(store.tiers.host.prefetch, [BlockKey(document.id, 1, 0, 0)])
        assert below.reading.wait(SECONDS)
        other.forget("book")
        notices = Aside(store.documents)
        notices.is_waiting()
        changes = Aside(change_the_map)
        changes.is_waiting()
        below.go.set()
        assert notices.end() == [kept]
        changes.end()
        with pytest.raises(DocumentNotFound):
            ahead.end()
        check_content(store, kept, text=2)
        check_slots(store.tiers.host)


# What is refused, and how it is told


def test_budgets_too_small_are_refused_by_the_tiers_name(
    model: LandmarkModel, memory: Path
) -> None:
    with pytest.raises(BudgetExceeded, match="a device budget of 10 bytes is too small"):
        MemoryStore.open(memory, device="cpu", device_budget=10)
    with pytest.raises(BudgetExceeded, match="a host budget of 10 bytes"):
        MemoryStore.open(memory, device="cpu", host_budget=10)
    with (
        MemoryStore.open(memory, device="cpu", device_budget=11 * TINY_BYTES) as store,
        pytest.raises(
            BudgetExceeded, match="the device budget holds 11 blocks, and one token reads up to 12"
        ),
    ):
        model.session(store)
    with (
        MemoryStore.open(memory, host_budget=11 * TINY_BYTES) as store,
        pytest.raises(BudgetExceeded, match="the host budget holds 11 blocks"),
    ):
        model.session(store)


@pytest.mark.parametrize(
    "option",
    [{"device": "nonsense"}, {"device": "cuda:99"}, {"policy": "mru"}, {"prefetch": "oracle"}],
)
def test_unknown_choices_are_refused_in_one_line_and_nothing_is_made(
    tmp_path: Path, option: dict[str, str]
) -> None:
    for make in (MemoryStore.create, MemoryStore.open):
        with pytest.raises(InvalidConfig) as refused:
            make(tmp_path / "m", SIGNATURE, **option)
        words = str(refused.value)
        assert repr(*option.values()) in words and "\n" not in words and len(words) < 300
        if make == MemoryStore.create:
            assert not (tmp_path / "m").exists()
            MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    with pytest.raises(InvalidInput, match="hnsw"):
        MemoryStore.create(tmp_path / "other", SIGNATURE, index="hnsw")
    assert not (tmp_path / "other").exists()
