"""A Hugging Face decoder that learns to attend by landmarks: what it computes while it is trained,
what a stored memory gives, and what the trained directory says.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from memstore.cli.main import app
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights, WrongModel
from memstore.hf.models_by_name import reader_named
from memstore.model.answer import Answer
from memstore.store.memory_store import MemoryStore
from memstore.training.curriculum import Stage, finetune_stages
from memstore.training.objectives import Chunks, encode_windows, read_memory
from memstore.training.subject import Finetune, TrainConfig
from memstore.training.train import train
from support.small_training import small, train_in_turns
from support.tiny_decoder import decoder, tokenizer

pytest.importorskip("transformers")
pytest.importorskip("peft")

from memstore.hf.landmark_decoder import (
    FILE,
    HuggingFaceLandmarkModel,
    LandmarkDecoder,
    LandmarkSpec,
)
from memstore.hf.load import load_reader

SIZE = 8
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, YaRN": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "qwen3": {},
    "gemma": {},
    "mistral": {"sliding_window": 4096},
    "phi": {"partial_rotary_factor": 0.5},  # half of a head is turned
    "glm": {},  # neighbours are turned together
    "cohere": {},
    "granite": {"attention_multiplier": 0.4, "logits_scaling": 3.0},
    "gpt_neox": {"num_key_value_heads": 4},
}


def landmark_decoder(kind: str = "llama", **form: Any) -> LandmarkDecoder:
    """Random weights, and two embeddings that no token has."""
    model = decoder(kind.partition(",")[0], **KINDS[kind])
    chosen = LandmarkSpec(
        **{"block_size": SIZE, "top_k": 6, "cmt_cutoff": 0.0, "kv_dtype": "float32", **form}
    )
    generator = torch.Generator().manual_seed(3)
    deviation = float(model.get_input_embeddings().weight.detach().std())
    names = ("landmark", "cmt") if chosen.cmt else ("landmark",)
    width = model.config.hidden_size
    rows = {name: deviation * torch.randn(width, generator=generator) for name in names}
    return LandmarkDecoder(model, chosen, rows).requires_grad_(False)


def with_landmarks(ids: list[int], built: LandmarkDecoder) -> torch.Tensor:
    """[1, blocks * (SIZE + 1)]."""
    blocks = torch.tensor(ids).view(-1, built.spec.block_size)
    landmarks = torch.full((len(blocks), 1), built.landmark_id)
    return torch.cat([blocks, landmarks], 1).view(1, -1)


def some_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 900, (count,), generator=generator).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_landmark_the_training_forward_is_the_stock_model(kind: str) -> None:
    built = landmark_decoder(kind, block_size=48, cmt=False)
    ids = some_ids(48, 1)
    hidden, _ = encode_windows(built, with_landmarks(ids, built), cmt=False)
    ours = built.logits(hidden[0, :48])
    stock = built.model(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-4 * float(stock.abs().max()))


@pytest.mark.parametrize(
    ("kind", "cmt"), [("llama", False), *((kind, True) for kind in ("llama, YaRN", "qwen3", "phi"))]
)
def test_a_question_to_a_stored_memory_equals_the_training_forward(
    kind: str, cmt: bool, tmp_path: Path
) -> None:
    """Every block is retrieved. Both texts are stored by `ingest`, in one chunk each."""
    built = landmark_decoder(kind, cmt=cmt)
    reader = HuggingFaceLandmarkModel(built, tokenizer())
    texts = [reader.tokenizer.decode(some_ids(60, seed)) for seed in (1, 2)]
    question = some_ids(2 * SIZE, 9)
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        windows = []
        for n, text in enumerate(texts):
            ids = reader.tokenizer.encode(text)
            text = reader.tokenizer.decode(ids[: 3 * SIZE])
            assert reader.tokenizer.encode(text) == ids[: 3 * SIZE]
            assert reader.ingest(text, store, name=str(n)).blocks == 3
            windows.append(with_landmarks(ids[: 3 * SIZE], built))
        with reader.session(store) as session:
            found = session.feed(question)
    _, memory = encode_windows(built, torch.cat(windows), cmt=cmt)
    asked = with_landmarks(question, built)
    views = torch.tensor([[0, 1]])
    chunks = Chunks(asked, views, torch.tensor([False]))
    trained = read_memory(built, chunks, memory, cmt=cmt)[0]
    # what follows a full block is predicted from its landmark's row
    rows = [n + n // SIZE + (n % SIZE == SIZE - 1) for n in range(2 * SIZE)]
    torch.testing.assert_close(found, trained[rows], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("gemma2", {"sliding_window": 4096}, "caps its attention scores"),
        ("gemma3_text", {"num_hidden_layers": 6}, "layers have different positions"),
        ("smollm3", {"no_rope_layer_interval": 2}, "some have none"),
        ("mistral", {"sliding_window": 50}, "see 50 tokens"),
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}, "no rotary positions"),
    ],
)
def test_what_cannot_attend_by_landmarks_is_refused_by_name(
    kind: str, changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidWeights, match=why):
        LandmarkDecoder(decoder(kind, **changed), LandmarkSpec())


def stages() -> tuple[Stage, ...]:
    return tuple(small(stage, lr=0.01) for stage in finetune_stages())


def tuned(out: Path, book: Path, tiny: Path, rank: int | None, turns: int = 1) -> LandmarkDecoder:
    """A run that is interrupted after every third step, and resumed."""
    form = Finetune(str(tiny), SIZE, rank)
    config = TrainConfig(out, stages=stages(), finetune=form, precision="float32", log_every=1)
    model = train_in_turns([config] * turns, [book], every=3)[1]
    assert isinstance(model, LandmarkDecoder)
    return model


class Run(NamedTuple):
    """A directory that nothing changes, and the model whose training left it."""

    path: Path
    trained: LandmarkDecoder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, book: Path, tiny: Path) -> dict[int | None, Run]:
    """By rank; None learns all weights."""
    paths = {rank: tmp_path_factory.mktemp("runs") / str(rank) for rank in (4, None)}
    return {rank: Run(path, tuned(path, book, tiny, rank)) for rank, path in paths.items()}


@pytest.mark.parametrize("rank", [4, None])
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path, book: Path, tiny: Path, runs: dict[int | None, Run], rank: int | None
) -> None:
    whole = runs[rank].trained.state_dict()
    resumed = tuned(tmp_path / "run", book, tiny, rank, turns=2).state_dict()
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], x) for name, x in resumed.items())
    for name in ("model.safetensors", FILE):
        expected, found = (load_file(path / name) for path in (runs[rank].path, tmp_path / "run"))
        assert all(torch.equal(expected[name], x) for name, x in found.items())


@pytest.mark.parametrize("rank", [4, None])
def test_the_directory_reads_as_the_model_that_was_trained(
    tiny: Path, runs: dict[int | None, Run], rank: int | None
) -> None:
    path, trained = runs[rank]
    loaded = load_reader(path, dtype=torch.float32)
    assert isinstance(loaded, HuggingFaceLandmarkModel)
    before = load_file(tiny / "model.safetensors")
    after = load_file(path / "model.safetensors")
    assert before.keys() == after.keys()  # merged: what transformers knows, and no more
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    if rank is None:
        assert changed == before.keys()
    else:
        assert changed == {name for name in before if "_proj" in name}
    ids = with_landmarks(some_ids(6 * SIZE, 4), trained)
    with torch.no_grad():
        unmerged, merged = (
            model.logits(encode_windows(model, ids)[0][0]) for model in (trained, loaded.decoder)
        )
    tolerance = 0.0 if rank is None else 2e-4 * float(unmerged.abs().max())
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=tolerance)


def test_the_command_trains_what_ask_then_reads_with(
    tmp_path: Path, book: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("memstore.training.curriculum.finetune_stages", stages)
    run = tmp_path / "run"
    command = ["train", str(book), "--out", str(run), "--model", str(tiny), "--block-size", "8"]
    told = CliRunner().invoke(app, [*command, "--precision", "float32", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["out"] == str(run)
    reader = reader_named(str(run))
    assert isinstance(reader, HuggingFaceLandmarkModel) and reader.shape.block_size == 8
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest("The number of the red lantern is 4711. " * 8, store, name="a")
        answer = reader.ask("What is the number of the red lantern?", store, max_new_tokens=3)
        assert isinstance(answer, Answer) and len(answer.tokens) == 3 and answer.sources
    other = reader_named(str(tiny))
    with pytest.raises(WrongModel, match="was made with run; this is "):
        MemoryStore.open(tmp_path / "m", other.signature).close()


def test_another_model_or_rank_cannot_go_on_with_a_run(
    tmp_path: Path, book: Path, tiny: Path, runs: dict[int | None, Run]
) -> None:
    shutil.copytree(runs[4].path, tmp_path / "run")
    usual = TrainConfig(tmp_path / "run", stages=stages(), precision="float32")
    for other in (Finetune(str(tiny), SIZE, 2), Finetune(str(tiny), 16, 4), None):
        with pytest.raises((InvalidConfig, InvalidInput, InvalidWeights)):
            train(replace(usual, finetune=other), [book], resume=True)


def test_training_goes_on_from_a_trained_directory_with_its_landmarks(
    tmp_path: Path, book: Path, runs: dict[int | None, Run]
) -> None:
    before = runs[4].path
    rows = load_file(before / FILE)
    none = tuple(replace(stage, steps=1, lr=0.0) for stage in stages()[:1])
    again = TrainConfig(
        tmp_path / "again", stages=none, finetune=Finetune(str(before)), precision="float32"
    )
    train(again, [book])
    for name, row in load_file(tmp_path / "again" / FILE).items():
        torch.testing.assert_close(row, rows[name])
    with pytest.raises(InvalidConfig, match="blocks of 8 tokens"):
        train(replace(again, out=tmp_path / "third", finetune=Finetune(str(before), 16)), [book])
