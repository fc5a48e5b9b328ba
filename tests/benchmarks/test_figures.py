"""Pictures of kept results: what they draw is what the files say."""

import json

import pytest

from benchmarks.real import recall_figure, speed_figure
from support.paths import ROOT

RESULTS = ROOT / "docs" / "results"


def kept(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_a_mean_over_kinds_weighs_kinds_alike_and_has_an_interval() -> None:
    rows = [{"right": 10, "questions": 10}, {"right": 50, "questions": 100}]
    mean, half = recall_figure.mean_of_kinds(rows) or (0.0, 0.0)
    assert mean == pytest.approx(0.75)
    assert 0.05 < half < 0.15
    assert recall_figure.mean_of_kinds([]) is None


def test_the_pictures_are_drawn_from_the_kept_results() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    accuracy, speed = figure(), figure()
    names = ("recall-8k", "recall-200", "recall-128k")
    recall_figure.draw(accuracy, [row for name in names for row in kept(name)["answers"]])
    first = ("first-token", "first-token-text")
    speed_figure.draw(speed, [run for name in first for run in kept(name).values()])
    assert [len(one.axes) for one in (accuracy, speed)] == [2, 2]
