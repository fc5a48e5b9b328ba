"""The context miss token's values: measured on text, kept beside the weights, of no matter for what
is stored.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.cli.main import app
from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.landmark.landmark_model import load_checkpoint, load_model
from memstore.model.landmark.memory_attention import MemoryAttention
from memstore.training.cmt_values import measure_cmt_values
from memstore.training.subject import new_model
from support.tiny_model import save_tiny_model, text, tiny_model

TEXT = text(900)


def with_values(directory: Path, values: Tensor | None = None) -> Path:
    """The tiny model with values, random ones unless given."""
    save_tiny_model(directory)
    if values is None:
        values = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | {"cmt_values": values}, weights)
    return directory


def test_values_are_the_least_squares_of_what_rows_with_a_low_gate_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "m")
    rows: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    attend, gate = MemoryAttention.attend, MemoryAttention._gate
    local: list[Any] = []

    def gated(self: MemoryAttention, layer: int, one: Any) -> Any:
        local.append(one)
        return gate(self, layer, one)

    def attended(self: MemoryAttention, layer: int, *qkv: Tensor) -> Tensor:
        local.clear()
        output = attend(self, layer, *qkv)
        if self.retrieve and local:
            rows[layer].append((local[0].gate[0], (output - local[0].output)[0]))
        return output

    monkeypatch.setattr(MemoryAttention, "_gate", gated)
    monkeypatch.setattr(MemoryAttention, "attend", attended)
    told: list[str] = []
    values, lost = measure_cmt_values(model, [TEXT, "short"], places=3, seed=0, report=told.append)
    assert told == ["3 of 3 places read"]
    assert sorted(rows) == [0, 1] and len(rows[0]) == 3
    for layer, seen in rows.items():
        for head in range(4):
            gates = torch.cat([gate[head] for gate, _ in seen]).double().numpy()
            taken = torch.cat([read[head] for _, read in seen]).double().numpy()
            low = gates < 0.3
            assert low.sum() > 20 and np.ptp(gates[low]) > 0.01
            best, left, *_ = np.linalg.lstsq(gates[low, None], taken[low], rcond=None)
            np.testing.assert_allclose(values[layer, head], best[0], rtol=1e-4, atol=1e-6)
            share = left.sum() / (taken[low] ** 2).sum()
            assert lost[layer, head] == pytest.approx(share, abs=1e-4)


def test_values_change_what_is_read_and_nothing_that_is_stored(tmp_path: Path) -> None:
    plain, valued = (load_model(save_tiny_model(tmp_path / "m")) for _ in range(2))
    valued.cmt_values = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    stored: list[list[Tensor]] = []
    states: list[Tensor] = []
    for model in (plain, valued):
        with MemoryStore.create(tmp_path / f"of{len(stored)}", model.signature) as store:
            model.ingest(TEXT[:1800], store, name="a")
            model.ingest(TEXT[1800::-1], store, name="b", cmt_cutoff=0.5)
            units = [
                BlockKey(document, 1, block, head)
                for document in (1, 2)
                for block in (0, 20, 40)
                for head in (0, 1)
            ]
            with store.lease(units) as lease:
                stored.append([x[lease.slots].clone() for x in (lease.k, lease.v)])
    for one, other in zip(*stored, strict=True):
        assert one.abs().max() > 0 and torch.equal(one, other)
    with MemoryStore.open(tmp_path / "of0", plain.signature) as store:
        for model in (plain, valued):
            with model.session(store, ["a"], cmt_cutoff=1.0) as session:
                states.append(session.feed(model.tokenizer.encode("the quiet river")))
    assert not torch.allclose(*states)


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match="size mismatch for cmt_values"):
        load_model(with_values(tmp_path / "m", torch.zeros(1, 4, 8)))


def test_training_goes_on_without_the_values_of_what_it_began_with(tmp_path: Path) -> None:
    begun = with_values(tmp_path / "m")
    config = load_checkpoint(begun)[0].config
    model = new_model(config, begun, 0)
    assert model.cmt_values is None and "cmt_values" not in model.state_dict()
    assert torch.equal(model.embedding.weight, load_checkpoint(begun)[0].embedding.weight)


def test_the_command_leaves_a_model_whose_memories_are_the_same(tmp_path: Path) -> None:
    model, prose, made = tmp_path / "m", tmp_path / "prose.txt", tmp_path / "made"
    save_tiny_model(model)
    prose.write_text(TEXT)
    command = ["calibrate", str(model), "--text", str(prose), "--windows", "8", "--json"]
    run = CliRunner().invoke(app, [*command, "--out", str(made)])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["values"] == [2, 4, 8] and 0 < told["lost"] < 1 and told["file"] == str(made)
    before, after = load_model(model), load_model(made)
    assert after.cmt_values is not None and after.signature == before.signature
    (tmp_path / "file").touch()
    run = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "file")])
    assert run.exit_code != 0 and "is not a directory" in json.loads(run.stdout)["error"]["message"]
    adapt = ["adapt", str(model), "--text", str(prose), "--out", str(made), "--json"]
    run = CliRunner().invoke(app, adapt)
    assert run.exit_code != 0 and "memstore calibrate" in json.loads(run.stdout)["error"]["message"]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no context miss token"):
        measure_cmt_values(tiny_model(tmp_path / "a", cmt=False), [TEXT], places=2, seed=0)
    with pytest.raises(InvalidInput, match="no text has 544 tokens"):
        measure_cmt_values(tiny_model(tmp_path / "b"), ["too short"], places=2, seed=0)
