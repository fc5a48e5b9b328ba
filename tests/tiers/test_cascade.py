"""Device, host and disk tier together: dropped units do not come back, and invalid budgets are
refused.
"""

import threading
from pathlib import Path

import pytest

from memstore.block import BlockKey
from memstore.disk.tables.catalog import Catalog
from memstore.errors import BudgetExceeded, DocumentNotFound, InvalidConfig
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.store.memory_store import MemoryStore
from memstore.tiers.cascade import Cascade
from support.counting_source import (
    SECONDS,
    SHAPE,
    UNIT_BYTES,
    Aside,
    CountingSource,
    Delayed,
    check_lease,
    check_slots,
    unit,
)
from support.synthetic_documents import CHUNK, SIGNATURE, check_content, ingest
from support.tiny_model import text, tiny_model

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
            assert not [unit for unit in tier._table.slots if unit.document < 0]
            assert not tier._table.pinned
        check_slots(store.tiers.device), check_slots(store.tiers.host)


def test_forgetting_during_a_prefetch_while_the_map_grows_does_not_deadlock(tmp_path: Path) -> None:
    """A reader's snapshot, the change of the map that waits for it, and the prefetch that waits for
    that: no circle.
    """
    with (
        MemoryStore.create(tmp_path / "m", SIGNATURE) as store,
        MemoryStore.open(tmp_path / "m") as other,
    ):
        document = ingest(store, "book", 2 * CHUNK)
        kept = ingest(store, "kept", 2 * CHUNK, text=2)
        reading, go = threading.Event(), threading.Event()

        def stand() -> None:
            reading.set()
            assert go.wait(SECONDS)

        store.tiers.host.source = Delayed(store.tiers.host.source, stand)
        gate = Catalog.open(tmp_path / "m").database._environment.gate

        def change_the_map() -> None:
            with gate.alone():
                pass

        ahead = Aside(store.tiers.host.prefetch, [BlockKey(document.id, 1, 0, 0)])
        assert reading.wait(SECONDS)
        other.forget("book")
        notices = Aside(store.documents)
        notices.is_waiting()
        changes = Aside(change_the_map)
        changes.is_waiting()
        go.set()
        assert notices.end() == [kept]
        changes.end()
        with pytest.raises(DocumentNotFound):
            ahead.end()
        check_content(store, kept, text=2)
        check_slots(store.tiers.host)


# Refusals and their messages


def test_budgets_too_small_are_refused_by_the_tier_name(model: LandmarkModel, memory: Path) -> None:
    with pytest.raises(BudgetExceeded, match="a device budget of 10 bytes is too small"):
        MemoryStore.open(memory, device="cpu", device_budget=10)
    with pytest.raises(BudgetExceeded, match="a host budget of 10 bytes"):
        MemoryStore.open(memory, device="cpu", host_budget=10)
    for tier, device in (("device", "cpu"), ("host", None)):
        why = f"the {tier} budget holds 11 blocks, and one token reads up to 12"
        options = {"device": device, f"{tier}_budget": 11 * TINY_BYTES}
        with MemoryStore.open(memory, **options) as store, pytest.raises(BudgetExceeded, match=why):
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
