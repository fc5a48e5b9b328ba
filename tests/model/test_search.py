"""Search with real stores and a tiny random model: ranking, scope, refusals."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import BudgetExceeded, DocumentNotFound, InvalidInput
from memstore.model.landmark import landmark_model as search
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.store.memory_store import MemoryStore
from support.tiny_model import text, tiny_model

PHRASE = "Zebras juggle eighteen purple umbrellas"


@pytest.fixture(scope="module")
def memory(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "m"
    with MemoryStore.create(path, model.signature) as store:
        model.ingest(text(300, seed=1), store, name="first")
        model.ingest(f"{text(60, seed=2)} {PHRASE}. {text(60, seed=3)}", store, name="second")
        model.ingest(text(120, seed=4), store, name="third")
    return path


@pytest.fixture
def store(model: LandmarkModel, memory: Path) -> Iterator[MemoryStore]:
    with MemoryStore.open(memory, model.signature, read_only=True) as store:
        yield store


def test_the_block_with_the_phrase_comes_first(model: LandmarkModel, store: MemoryStore) -> None:
    found = model.search(PHRASE, store, top_k=4)
    assert found[0].document == "second" and any(word in found[0].text for word in PHRASE.split())
    weights = [source.weight for source in found]
    assert weights == sorted(weights, reverse=True) and weights[0] > 1.2 * weights[1]
    assert all(0 <= weight <= 1 for weight in weights)


def test_a_document_that_was_not_chosen_never_appears(
    model: LandmarkModel, store: MemoryStore
) -> None:
    assert {
        source.document for source in model.search(PHRASE, store, documents=["third"], top_k=1000)
    } == {"third"}
    best = model.search(PHRASE, store, documents=["third", "second"], top_k=1)[0]
    assert (best.document, best.block) == ("second", model.search(PHRASE, store, top_k=1)[0].block)
    assert model.search(PHRASE, store, documents=[]) == []


def test_a_shortlist_bounds_the_blocks_that_a_search_reads(
    model: LandmarkModel, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.search(PHRASE, store, top_k=1000)
    weights = {(source.document, source.block): source.weight for source in whole}
    monkeypatch.setattr(search, "_HITS", 1)
    monkeypatch.setattr(search, "SHORTLIST", 10)
    before = store.tier_stats()["host"]
    listed = model.search(PHRASE, store, top_k=1000)
    after = store.tier_stats()["host"]
    read = after["hits"] + after["misses"] - before["hits"] - before["misses"]
    assert 1 < read == len(listed) < len(whole)
    for source in listed:
        place = source.document, source.block
        assert source.weight == pytest.approx(weights[place], rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{"cmt": False}, {"old_block_position": "stingy"}, {"num_kv_heads": 4}]
)
def test_landmark_models_of_other_shapes_search_too(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    other = tiny_model(tmp_path / "model", **changes)
    with MemoryStore.create(tmp_path / "m", other.signature) as store:
        other.ingest(f"{text(100)} {PHRASE}. {text(100, seed=1)}", store, name="a")
        at = len(text(100)) + 1
        spans = [source.span for source in other.search(PHRASE, store, top_k=3)]
        assert any(first < at + len(PHRASE) and end > at for first, end in spans)
        assert len(other.search(PHRASE, store, top_k=9)) == 9


def test_invalid_searches_are_refused(
    model: LandmarkModel, store: MemoryStore, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="phrase is empty"):
        model.search(" \n", store)
    with pytest.raises(InvalidInput, match="top_k must be at least 1, is 0"):
        model.search(PHRASE, store, top_k=0)
    with pytest.raises(DocumentNotFound, match="'fourth'"):
        model.search(PHRASE, store, documents=["fourth"])
    with (
        MemoryStore.create(tmp_path / "empty", model.signature) as empty,
        pytest.raises(InvalidInput, match="no finished document to search"),
    ):
        model.search(PHRASE, empty)


def test_search_is_right_while_others_lease_most_units(model: LandmarkModel, memory: Path) -> None:
    with MemoryStore.open(memory, model.signature, read_only=True, host_budget=1 << 14) as store:
        free = model.search(PHRASE, store, top_k=5)
        number = store.document("first").id
        most = store.tiers.top.capacity
        held = [search.BlockKey(number, 1, block, 0) for block in range(most - 1)]
        with store.lease(held):
            slower = model.search(PHRASE, store, top_k=5)
            assert [s.block for s in slower] == [s.block for s in free]
            weights = [s.weight for s in slower]
            assert weights == pytest.approx([s.weight for s in free], rel=1e-5)
        with (
            store.lease([*held, search.BlockKey(number, 1, most, 0)]),
            pytest.raises(BudgetExceeded),
        ):
            model.search(PHRASE, store)
