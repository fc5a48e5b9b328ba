"""Growth of costs: slopes, the bytes that a generated token reads, and the page's kept results."""

import json

import pytest
import torch
from torch import nn

from benchmarks.speed import growth_figure
from benchmarks.speed.growth_weights import bytes_read
from memstore.hf.generation.quantized_weights import QuantizedWeights, join
from support.paths import ROOT

KEPT = ROOT / "docs" / "results" / "cost.json"


def test_a_slope_is_the_exponent_of_a_power_law() -> None:
    x = [1.0, 10.0, 1000.0]
    assert growth_figure.slope(x, [3 * one**0.7 for one in x]) == pytest.approx(0.7)
    assert growth_figure.slope(x, [5.0, 5.0, 5.0]) == pytest.approx(0, abs=1e-9)


def test_layers_that_share_quantized_weights_read_them_once() -> None:
    layers = nn.ModuleList([nn.Linear(64, rows, bias=False) for rows in (32, 96)]).bfloat16()
    full = [one.weight.nbytes for one in layers]
    assert [bytes_read(one) for one in layers] == full
    weights = QuantizedWeights(layers, nn.Identity(), "int8")
    with weights.used():
        alone = [bytes_read(one) for one in layers]
    assert alone == [rows * (64 + 2) for rows in (32, 96)]  # codes, and a scale of every row
    assert join(list(layers)) is not None
    assert [bytes_read(one) for one in layers] == pytest.approx(alone)


def test_every_curve_of_the_page_has_its_points() -> None:
    points = json.loads(KEPT.read_text())
    for curve in growth_figure.CURVES:
        x, y = growth_figure.points_of(points, curve)
        assert len(x) > 1 and x == sorted(set(x)), curve
        assert torch.tensor(y).isfinite().all() and min(y) > 0


def test_the_picture_has_a_panel_a_part() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    growth_figure.draw(figure, json.loads(KEPT.read_text()))
    assert len(figure.axes) == 4
