"""Replays of lookups count what a tier counts, and give every policy the hits of its reference.

tests/data/trace-books.zst holds the lookups of 40 questions that a real model answered about six
books of 32,768 tokens: numbers of documents, blocks and heads only.
"""

from pathlib import Path

import pytest

from benchmarks import tiers as tiers_benchmark
from benchmarks.replay import Recorded, belady, replay
from memstore.tiers.policy import POLICIES
from support import tiny_model

TRACE = tiers_benchmark.TRACE
EXPECTED = {  # capacity as a share of the units looked up -> hits, of 32,447 units asked for
    0.02: {"lru": 6357, "arc": 7027, "belady": 9499},
    0.1: {"lru": 13515, "arc": 14101, "belady": 15902},
    0.3: {"lru": 24747, "arc": 25092, "belady": 27634},
}


@pytest.fixture(scope="module")
def books() -> Recorded:
    return Recorded.load(TRACE)


# The recorded trace


@pytest.mark.parametrize("share", EXPECTED)
def test_recorded_lookups_give_every_policy_the_known_hits(books: Recorded, share: float) -> None:
    capacity = round(share * books.units)
    hits = {name: replay(books.requests, capacity, name).hits for name in POLICIES}
    best = belady(books.requests, capacity).hits
    assert hits | {"belady": best} == EXPECTED[share]
    assert best >= max(hits.values())


def test_predictions_save_misses(books: Recorded) -> None:
    capacity = round(0.2 * books.units)
    alone = replay(books.requests, capacity, "arc")
    helped = replay(books.requests, capacity, "arc", books.predicted)
    assert helped.hits + helped.misses == alone.hits + alone.misses
    assert helped.misses < 0.8 * alone.misses


def test_the_benchmark_replays_what_it_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text(tiny_model.text(900))
    model = tiny_model.save_tiny_model(tmp_path / "model")
    words = ["--trace", tmp_path / "trace.zst", "--capacities", "10%", "50%"]
    record = ["--text", text, "--model", model, "--questions", "2"]
    monkeypatch.setattr("sys.argv", ["tiers", *map(str, [*words, *record])])
    tiers_benchmark.main()
    recorded = capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["tiers", *map(str, words)])
    tiers_benchmark.main()
    assert capsys.readouterr().out == recorded and "| 50% " in recorded
