"""Checkpoints of landmark models: weights that contradict the config are refused, and values of the
context miss token are loaded.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.errors import InvalidWeights
from memstore.model.landmark.landmark_model import load_checkpoint, load_model
from memstore.training.train import new_model
from support.tiny_model import save_tiny_model, text

TEXT = text(900)


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


def test_context_miss_values_change_attention_but_not_stored_blocks(tmp_path: Path) -> None:
    plain, valued = (load_model(save_tiny_model(tmp_path / "m")) for _ in range(2))
    valued.cmt_values = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    stored: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for model in (plain, valued):
        with MemoryStore.create(tmp_path / f"of{len(stored)}", model.signature) as store:
            model.ingest(TEXT[:1800], store, name="a")
            model.ingest(TEXT[1800::-1], store, name="b", cmt_cutoff=0.5)
            units = [BlockKey(n, 1, block, 0) for n in (1, 2) for block in (0, 20, 40)]
            with store.lease(units) as lease:
                stored.append(torch.stack([x[lease.slots] for x in (lease.k, lease.v)]))
            with model.session(store, ["a"], cmt_cutoff=1.0) as session:
                states.append(session.feed(model.tokenizer.encode("the quiet river")))
    assert stored[0].abs().max() > 0 and torch.equal(*stored)
    assert not torch.allclose(*states)


def test_context_miss_values_belong_to_the_weights_they_were_measured_with(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"cmt_values": torch.zeros(1, 4, 8)}, path / "model.safetensors")
    with pytest.raises(InvalidWeights, match="size mismatch for cmt_values"):
        load_model(path)
    save_file(weights | {"cmt_values": torch.ones(2, 4, 8)}, path / "model.safetensors")
    assert load_model(path).cmt_values is not None
    assert new_model(load_model(path).config, path, 0).cmt_values is None
