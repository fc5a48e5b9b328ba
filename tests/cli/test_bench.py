"""Measuring the tiers: live runs, and replays of lookups that a real model made over real books.

tests/data/trace-books.zst was recorded with the shipped model by
    memstore bench tiers --text books-test.jsonl.zst --books 6 --tokens 32768 --questions 40
    --budgets 1% --trace FILE
and holds numbers of documents, blocks and heads only.
"""

from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.cli.bench_replay import Settings, print_replay, run_replay
from memstore.cli.bench_tiers import books_memory, draw_questions, print_live, run_live
from memstore.errors import InvalidConfig, InvalidInput
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.tiers.policy import POLICIES
from memstore.tiers.recorded import Recorded
from memstore.tiers.replay import belady, replay, replay_tiers
from memstore.tiers.tier_options import DEFAULT_POLICY
from support import tiny_model
from support.paths import DATA

TRACE = DATA / "trace-books.zst"
EXPECTED = {  # capacity as a share of the units looked up -> hits, of 32,447 units asked for
    0.02: {"lru": 6357, "arc": 7027, "belady": 9499},
    0.1: {"lru": 13515, "arc": 14101, "belady": 15902},
    0.3: {"lru": 24747, "arc": 25092, "belady": 27634},
}
QUESTION = "the river of the captain"


@pytest.fixture(scope="module")
def books() -> Recorded:
    return Recorded.load(TRACE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LandmarkModel:
    return tiny_model.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "mem"
    with MemoryStore.create(path, model.signature) as memory:
        for seed in range(3):
            model.ingest(tiny_model.text(400, seed), memory, name=f"book {seed}")
    return path


# The recorded trace


@pytest.mark.parametrize("share", EXPECTED)
def test_the_books_trace_gives_every_policy_the_hits_it_gave_before(
    books: Recorded, share: float
) -> None:
    capacity = round(share * books.units)
    hits = {name: replay(books.requests, capacity, name).hits for name in POLICIES}
    best = belady(books.requests, capacity).hits
    assert hits | {"belady": best} == EXPECTED[share]
    assert best >= max(hits.values())


@pytest.mark.parametrize("name", POLICIES)
def test_the_books_trace_unit_by_unit_hits_as_in_libcachesim(name: str, books: Recorded) -> None:
    library: Any = pytest.importorskip("libcachesim")
    assert isinstance(library, ModuleType)
    stream = list(chain.from_iterable(books.requests))
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(stream), 1)}
    capacity = round(0.1 * len(numbers))
    simulated = getattr(library, name.upper())(capacity)
    hits = sum(simulated.get(library.Request(obj_id=numbers[unit], obj_size=1)) for unit in stream)
    assert replay([[unit] for unit in stream], capacity, name).hits == hits


def test_predictions_are_used_and_every_unit_that_was_read_is_accounted_for(
    books: Recorded,
) -> None:
    capacity = round(0.2 * books.units)
    alone = replay(books.requests, capacity, "arc")
    helped = replay(books.requests, capacity, "arc", books.ahead("recorded"))
    assert helped.hits + helped.misses == alone.hits + alone.misses
    # it is full at the end
    assert helped.misses + helped.prefetched + helped.unused == helped.evictions + capacity
    assert helped.misses < 0.8 * alone.misses
    assert helped.unused < helped.prefetched


def test_a_tier_below_is_asked_for_what_the_one_above_missed(books: Recorded) -> None:
    capacities = [round(share * books.units) for share in (0.02, 0.2)]
    upper, lower = replay_tiers(books.requests, capacities, "lru")
    assert upper == replay(books.requests, capacities[0], "lru")
    assert lower.hits + lower.misses == upper.misses and lower.hits > 0


def test_replays_of_the_trace_are_compared_with_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = Settings((0.05, 0.2), ("lru", "arc"), ("off", "recorded"))
    result = run_replay(TRACE, settings)
    assert len(result["runs"]) == 8 and len(result["belady"]) == 2
    for bound in result["belady"]:
        runs = [
            run
            for run in result["runs"]
            if run["share"] == bound["share"] and run["prefetch"] == "off"
        ]
        assert len(runs) == 2 and all(run["hits"] <= bound["hits"] for run in runs)
    print_replay(result)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in lines if line.split()[1:2] == ["belady"]]) == 2
        and "at once" in lines[-1]
    )


def test_the_default_policy_is_not_far_from_the_best_one_on_the_books_trace() -> None:
    means = {name: sum(hits[name] for hits in EXPECTED.values()) for name in POLICIES}
    assert means[DEFAULT_POLICY] > 0.99 * max(means.values())


# What a replay counts


def units(*numbers: int, layer: int = 1) -> list[BlockKey]:
    return [BlockKey(1, layer, number, 0) for number in numbers]


def test_predicted_units_are_hits_once_there_and_unused_if_nothing_asks() -> None:
    result = replay([units(1), units(2), units(3)], 4, "lru", [units(1), units(1, 9), []])
    assert (result.hits, result.misses, result.prefetched, result.unused) == (1, 2, 1, 1)
    # More than fits is passed over, and what goes before it is asked for was read for nothing.
    result = replay([units(5), units(1)], 2, "lru", [units(1, 2, 3), []])
    assert (result.hits, result.misses, result.unused) == (0, 2, 2)


def test_the_use_that_a_unit_was_prefetched_for_does_not_make_it_a_frequent_one() -> None:
    """ARC would keep it among the units that were used again, and let one of those go."""
    often, once = units(1), units(2)
    requests = [often, often, once, units(3), units(4), often]
    result = replay(requests, 2, "arc", [[], [], once, units(3), units(4), []])
    assert (result.hits, result.misses, result.prefetched, result.unused) == (5, 1, 3, 0)


def test_reuse_is_counted_within_a_layer() -> None:
    requests = [units(1, 2), units(1, 2, layer=2), units(1, 3), units(4), units(2)]
    reuse = Recorded(requests, []).reuse()
    assert reuse[1][1] == pytest.approx(1 / 6, abs=1e-4)  # unit 1, in the next lookup
    assert reuse[1][2] == reuse[1][1] and reuse[1][4] == pytest.approx(2 / 6, abs=1e-4)
    assert set(reuse[2].values()) == {0.0}


# Live


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_counts_what_the_tier_counted(
    policy: str, model: LandmarkModel, store: Path, tmp_path: Path
) -> None:
    """Without a prefetcher, and with no block of a session's own, the two are the same."""
    trace, capacity = tmp_path / "trace.zst", 20
    unit_bytes = 2 * model.config.block_size * model.config.head_dim * 2
    with MemoryStore.open(
        store, model.signature, host_budget=capacity * unit_bytes, policy=policy, trace=trace
    ) as memory:
        for word in ("river", "window", "garden"):
            model.ask(
                f"the {word} of", memory, max_new_tokens=8, until_sentence=False, cmt_cutoff=0.0
            )
        counts = memory.tier_stats()["host"]
    result = replay(Recorded.load(trace).requests, capacity, policy)
    assert result.evictions > 0
    assert (result.hits, result.misses, result.evictions) == (
        counts["hits"],
        counts["misses"],
        counts["evictions"],
    )


def test_live_runs_give_the_same_answers_and_a_trace(
    model: LandmarkModel, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.zst"
    opened = []
    settings = Settings((0.3, 1.0), ("lru", "arc"), ("off", "speculative"))
    result = run_live(model, store, settings, questions=3, trace=trace, prepare=opened.append)
    assert result["same_answers"] and len(result["runs"]) == 8 and len(opened) == 9
    assert [book["name"] for book in result["books"]] == ["book 0", "book 1", "book 2"]
    for run in result["runs"]:
        assert (
            run["hits"] + run["misses"] == result["runs"][0]["hits"] + result["runs"][0]["misses"]
        )
        assert sum(layer["hits"] for layer in run["layers"]["host"].values()) == run["hits"]
        assert run["read_ahead"] == run["prefetched"] + run["late"] + run["unused"]
    assert any(run["prefetched"] for run in result["runs"] if run["prefetch"] == "speculative")
    recorded = Recorded.load(trace)
    assert recorded.requests and any(recorded.predicted)
    print_live(result)
    assert "the same in every run" in capsys.readouterr().out


def test_books_are_read_from_files_or_from_what_python_has(
    model: LandmarkModel, tmp_path: Path
) -> None:
    files = []
    for seed in range(3):
        files.append(tmp_path / f"{seed}.txt")
        files[-1].write_text(tiny_model.text(300, seed))
    for texts, books in ((files, 2), ([], 4)):
        with (
            books_memory(model, texts, books, 256) as path,
            MemoryStore.open(path, read_only=True) as memory,
        ):
            assert len(memory.documents()) == books
            assert all(200 < document.tokens <= 256 for document in memory.documents())
        assert not path.exists()


def test_questions_are_passages_of_the_books_and_names_in_them(
    model: LandmarkModel, store: Path
) -> None:
    with MemoryStore.open(store, model.signature, read_only=True) as memory:
        asked = draw_questions(model, memory, 5, seed=3)
        assert asked == draw_questions(model, memory, 5, seed=3)
    assert [question.kind for question in asked] == [
        "passage",
        "fact",
        "passage",
        "fact",
        "passage",
    ]
    assert [question.continues for question in asked] == [False, True, False, True, False]


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, model: LandmarkModel, store: Path
) -> None:
    good: dict[str, Any] = {"budgets": (0.1,), "policies": ("lru",), "prefetch": ("off",)}
    for wrong in (
        {"budgets": (0.0,)},
        {"budgets": (1.5,)},
        {"policies": ("fifo",)},
        {"prefetch": ("all",)},
    ):
        with pytest.raises(InvalidConfig):
            run_live(model, store, Settings(**good | wrong), questions=1)
        with pytest.raises(InvalidConfig):
            run_replay(TRACE, Settings(**good | wrong))
    with pytest.raises(InvalidConfig, match="recorded"):
        run_live(model, store, Settings(**good | {"prefetch": ("recorded",)}), questions=1)
    with MemoryStore.open(store, model.signature, trace=tmp_path / "empty.zst"):
        pass
    with pytest.raises(InvalidInput, match="no lookup"):
        run_replay(tmp_path / "empty.zst", Settings(**good))
