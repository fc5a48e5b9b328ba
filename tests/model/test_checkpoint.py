"""A landmark model's checkpoint is refused where its weights contradict its config."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memstore.errors import InvalidWeights
from memstore.model.landmark.landmark_model import load_checkpoint
from support.tiny_model import save_tiny_model


@pytest.mark.parametrize(
    "change",
    [
        lambda weights, name: {**weights, name: weights[name][:1].clone()},
        lambda weights, name: {**weights, name: weights[name].int()},
        lambda weights, name: {**weights, name: weights[name] * float("nan")},
        lambda weights, name: {**weights, "more": weights[name].clone()},
        lambda weights, name: {key: value for key, value in weights.items() if key != name},
    ],
    ids=["shape", "dtype", "not finite", "additional", "missing"],
)
def test_weights_that_contradict_the_config_are_refused(
    tmp_path: Path, change: Callable[..., dict[str, torch.Tensor]]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file(change(weights, sorted(weights)[0]), model / "model.safetensors")
    with pytest.raises(InvalidWeights):
        load_checkpoint(model)
