"""What is reckoned follows from what was measured: by the token, and by the document."""

import json
from pathlib import Path

import pytest

from benchmarks.share.reckoning import breaks, measured, reckoned

TWO = {
    "ms, asked again": [20.0, 40.0, 30.0],
    "tokens": 1_000_000,
    "resident": {"own": 24_000_000},
    "lists": {"bytes": 31_000_000},
    "seconds of a core for that": 10.0,
}
ROUNDS = [{"alone, of a processor": speed} for speed in (900.0, 800.0, 850.0)]
SHORT = {
    "publish all": {"sent": 100_000 * 64 * 75},
    "publish replaced": {"sent": 256 * 150},
    "open published": {"core": 3.0},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, found in (
        ("two-stages", TWO),
        ("two-stages-afar", {"afar": {"0": {"questions": [{"MB": 5.0}, {"MB": 9.0}]}}}),
        ("library", {"file": {"found": {"rounds": ROUNDS}}}),
        ("short-documents", {"short documents, passages": {"found": {"100,000": SHORT}}}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_what_is_reckoned_follows_from_what_was_measured(results: Path) -> None:
    by = measured(results)
    assert by.published == 75 and by.resident == 24 and by.lists == 31 and by.row == 150
    small, large = (reckoned(by, tokens, 1e9, 1000) for tokens in (1e9, 1e12))
    assert small["dollars to read in"] == pytest.approx(1e9 / 850 / 3600 * 0.04)
    assert small["one machine: memory, GB"] == pytest.approx(24)
    assert small["one machine: a question, s"] == pytest.approx(0.03 * 1000)
    assert small["one reader: to the first question, s"] == pytest.approx(5e9 / 125e6)
    assert small["one reader: to open, s"] == pytest.approx(1e9 / 2000 * 3e-5)
    assert small["TB stored"] == pytest.approx((106e9 + 1e9 / 2000 * 150) / 1e12)
    for name, value in large.items():
        if not name.startswith("shards: slowest") and not name.startswith("objects"):
            assert value == pytest.approx(1000 * small[name], rel=0.01), name
    # one shard takes what was measured, a thousand what the slowest of them takes
    assert small["shards: slowest of all, s"] == pytest.approx(30)
    assert large["shards: slowest of all, s"] == pytest.approx(40)
    assert large["shards"] == 1000


def test_a_limit_is_where_a_part_takes_all_there_is(results: Path) -> None:
    by = measured(results)
    limits = breaks(by)
    reader = limits["a reader waits a minute for the first answer"]
    assert reckoned(by, reader, 1e9, 1)["one reader: to the first question, s"] == pytest.approx(60)
    memory = limits["a machine's memory holds no more lists"]
    assert reckoned(by, memory, 1e9, 1)["one machine: memory, GB"] == pytest.approx(256)
    assert limits["a manifest names no more pages"] > 1e11
