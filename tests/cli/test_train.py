"""The train command, with small batches and small models."""

from dataclasses import replace
from pathlib import Path

import pytest

from memstore.model.landmark.landmark_model import read_configuration
from memstore.model.landmark.transformer import PRESETS, ModelConfig
from memstore.training import curriculum
from support.commands import refused, run

pytestmark = pytest.mark.usefixtures("the_model")


@pytest.fixture
def small_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole plan of `memstore train`, in small batches for small models."""
    small = {"batch": 4, "blocks": 3, "chunk_blocks": 2, "memory_windows": 4, "memory_blocks": 4}
    stages = tuple(replace(stage, **small) for stage in curriculum.default_curriculum())
    monkeypatch.setattr(curriculum, "default_curriculum", lambda: stages)
    shape = {"vocab_size": 1024, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}
    test = ModelConfig(**shape, head_dim=16, num_layers=2, mlp_size=48)
    books = replace(test, num_layers=3, mlp_size=64, memory_layers=(2,))
    monkeypatch.setitem(PRESETS, "test", test)
    monkeypatch.setitem(PRESETS, "books", books)


@pytest.mark.usefixtures("small_training")
def test_a_trained_model_can_be_asked_and_trained_further(
    tmp_path: Path, story: Path, book: Path
) -> None:
    first, store = tmp_path / "first", tmp_path / "memory"
    train, briefly = ("train", book, "--out"), ("--minutes", "0.002")
    trained = run(*train, first, *briefly, "--json")
    assert trained.status == 0 and trained.json["out"] == str(first)
    assert trained.err.startswith("precision ")
    refused(run(*train, first), "--resume")
    assert run(*train, first, *briefly, "--resume").status == 0
    model = ("--store", store, "--model", first)
    assert run("ingest", story, *model).status == 0
    asked = run("ask", "Who?", *model, "--json", "--max-new-tokens", "3")
    assert asked.status == 0 and len(asked.json["tokens"]) <= 3
    further = (*train, tmp_path / "further", "--from-stage", "wide", *briefly)
    assert run(*further, "--init", first).status == 0
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "further")]
    assert tokenizers[0] == tokenizers[1]


@pytest.mark.usefixtures("small_training")
def test_a_run_is_resumed_in_its_own_shape(tmp_path: Path, book: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for out, begin in ((first, ("--preset", "books")), (second, ("--init", first))):
        train = ("train", book, "--out", out)
        for how in (begin, ("--resume",)):
            assert run(*train, *how, "--minutes", "0.0001").status == 0
        assert read_configuration(out) == PRESETS["books"]
        other = run(*train, "--resume", "--preset", "test")
        refused(other, "begun with another model (num_layers 3, mlp_size 64")


def test_a_training_run_that_cannot_begin_is_refused(tmp_path: Path, book: Path) -> None:
    out = tmp_path / "run"
    refused(run("train", book, "--out", out, "--from-stage", "dense"), "windows, varied")
    device = run("train", book, "--out", out, "--device", "cuda:99")
    refused(device, "'cuda:99'", "choose auto, cuda, mps or cpu")
    assert not out.exists()
    refused(run("train", tmp_path / "none.txt", "--out", out), "none.txt")
    refused(run("train", book, "--out", out, "--resume"), "no training run")
    refused(run("train", book, "--out", out, "--init", tmp_path / "none"), "none")
