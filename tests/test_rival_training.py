"""Training with other memories than landmarks: the same texts, resumable, and told apart."""

import json
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memstore.cli.main import app
from memstore.errors import InvalidConfig
from memstore.model.config import ModelConfig
from memstore.model.transformer import Transformer
from memstore.rivals.config import MEMORIES, MemoryConfig
from memstore.rivals.reading import load_rival
from memstore.rivals.transformer import RivalTransformer
from memstore.training import rival_steps
from memstore.training.batches import MemoryBatch, QuestionBatch
from memstore.training.curriculum import default_curriculum
from memstore.training.new_model import new_model
from memstore.training.optimizer import make_optimizers
from memstore.training.train import TrainConfig, train

MODEL = ModelConfig(
    vocab_size=1024,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    block_size=16,
    chunk_blocks=2,
    top_k=2,
)


def stages() -> tuple:
    windows, _, memory, *_ = default_curriculum()
    small: dict[str, Any] = {
        "steps": 2,
        "batch": 4,
        "blocks": 5,
        "chunk_blocks": 2,
        "memory_windows": 4,
        "memory_blocks": 3,
        "warmup": 1,
    }
    return replace(windows, **small), replace(memory, **small)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(list(topics.values())[:25]))
    return path


def run(
    out: Path, book: Path, memory: MemoryConfig | None, turns: int = 1, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run that is interrupted after every second step."""
    losses: list[float] = []

    def report(line: dict[str, Any]) -> None:
        if "loss" in line:
            losses.append(line["loss"])
            if len(losses) % 2 == 0 and len(losses) < 2 * turns:
                raise KeyboardInterrupt

    settings = {"precision": "float32", "seed": 3, **settings}
    config = TrainConfig(out, MODEL, stages(), memory=memory, log_every=1, **settings)
    for turn in range(turns):
        try:
            return losses, dict(train(config, [book], resume=turn > 0, report=report).state_dict())
        except KeyboardInterrupt:
            continue
    raise AssertionError("the last turn was interrupted")


@pytest.mark.parametrize("name", MEMORIES)
def test_an_interrupted_run_of_any_memory_ends_with_the_same_bits(
    tmp_path: Path, book: Path, name: str
) -> None:
    whole, parts = (run(tmp_path / str(n), book, MEMORIES[name], n) for n in (1, 2))
    assert len(whole[0]) == 4 and whole[0] == parts[0]
    assert all(torch.equal(whole[1][n], x) for n, x in parts[1].items())
    kept = load_rival(tmp_path / "2")
    assert kept.transformer.memory_config == MEMORIES[name].of(MODEL)
    torch.testing.assert_close(dict(kept.transformer.state_dict()), whole[1])
    with kept.session() as reading:
        assert reading.logits(reading.feed(list(range(70)))).isfinite().all()


def test_every_memory_is_shown_the_same_texts(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[torch.Tensor]] = {}
    real = rival_steps.Steps._drawn_memory

    for name in ("landmark", "none", "infini"):
        seen = drawn[name] = []

        def noted(self: Any, stage: Any, seen: list = seen) -> tuple[MemoryBatch, QuestionBatch]:
            memory, questions = real(self, stage)
            seen.extend([memory.ids, questions.ids, questions.visible])
            return memory, questions

        monkeypatch.setattr(rival_steps.Steps, "_drawn_memory", noted)
        run(tmp_path / name, book, MEMORIES.get(name))
    assert len(drawn["none"]) == 6
    tokens = {
        name: [json.loads(line).get("tokens", 0) for line in metrics.read_text().splitlines()[1:]]
        for name in drawn
        for metrics in [tmp_path / name / "metrics.jsonl"]
    }
    # two steps of 4 windows of 5 blocks of 16 tokens; then 4 of 3 blocks, and chunks
    assert tokens["landmark"][:2] == tokens["none"][:2] == [320, 640]
    assert tokens["landmark"][3] == 640 + 2 * (4 * 3 + 4 * 2) * 16
    assert tokens["none"] == tokens["infini"]
    assert 0.75 <= (tokens["none"][3] - 640) / (tokens["landmark"][3] - 640) <= 1
    for name in ("none", "infini"):
        assert all(torch.equal(a, b) for a, b in zip(drawn[name], drawn["landmark"], strict=True))


def test_chunks_stand_behind_the_windows_that_they_may_read() -> None:
    windows = torch.arange(4)[:, None].expand(4, 6) * 10
    memory = MemoryBatch(windows, torch.ones(4, 6), [], {}, [], None, [], None)  # type: ignore[arg-type]
    questions = QuestionBatch(
        torch.arange(5)[:, None].expand(5, 3) + 100,
        torch.ones(5, 3),
        torch.tensor([[0, 1], [3, 1], [2, 3], [0, 2], [1, 2]]),
        torch.tensor([False, True, False, False, False]),
    )
    ids, weights = rival_steps.in_a_row(memory, questions)
    # 4 * 6 + 5 * 3 tokens in texts of 2 * 6 + 3
    assert ids[:, ::6].tolist() == [[0, 10, 100], [10, 30, 101]]
    assert weights[0].tolist() == [0, 1, 1, 1, 1, 1] * 2 + [0, 1, 1]


def test_gates_learn_at_their_own_rate_and_without_decay() -> None:
    for name, rate in (("infini", 0.01), ("infini-slow-gate", 0.002), ("memorizing", 0.002)):
        model = RivalTransformer(MODEL, MEMORIES[name])
        adam, muon = make_optimizers(model, 0.002, 0.02, model.own_rates())
        gate = model.get_parameter("memory.gate")
        (group,) = [g for g in adam.param_groups if any(p is gate for p in g["params"])]
        assert (group["lr"], group["weight_decay"]) == (rate, 0.0)
        grouped = [
            p for optimizer in (adam, muon) for g in optimizer.param_groups for p in g["params"]
        ]
        assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["none", "transformer-xl-relative", "memorizing", "infini"])
def test_half_precision_trains_every_memory(tmp_path: Path, book: Path, name: str) -> None:
    losses, weights = run(tmp_path, book, MEMORIES[name], precision="bfloat16")
    expected, _ = run(tmp_path / "exact", book, MEMORIES[name])
    assert losses == pytest.approx(expected, rel=0.05)
    assert {x.dtype for x in weights.values()} == {torch.float32}


def test_a_memory_takes_the_layers_of_another_and_what_it_has_learned_of_its_own(
    tmp_path: Path, book: Path
) -> None:
    _, first = run(tmp_path / "infini", book, MEMORIES["infini"])
    same = new_model(MODEL, MEMORIES["infini"], tmp_path / "infini", 9).state_dict()
    assert all(torch.equal(x, first[name]) for name, x in same.items())
    other = new_model(MODEL, MEMORIES["memorizing"], tmp_path / "infini", 9).state_dict()
    fresh = RivalTransformer(MODEL, MEMORIES["memorizing"]).state_dict()
    for name, x in other.items():
        assert torch.equal(x, (fresh if name.startswith("memory.") else first)[name])
    taller = replace(MODEL, num_layers=3, memory_layers=(2,))
    grown = new_model(taller, MEMORIES["none"], tmp_path / "infini", 9)
    assert len(grown.blocks) == 3
    with_landmarks = new_model(MODEL, None, tmp_path / "infini", 9)
    assert not isinstance(with_landmarks, RivalTransformer)
    assert all(torch.equal(x, first[n]) for n, x in with_landmarks.state_dict().items())
    _, landmarks = run(tmp_path / "landmarks", book, None)
    from_landmarks = new_model(MODEL, MEMORIES["none"], tmp_path / "landmarks", 9)
    assert not isinstance(new_model(MODEL, None, tmp_path / "landmarks", 9), RivalTransformer)
    assert isinstance(from_landmarks, Transformer)
    assert all(torch.equal(x, landmarks[n]) for n, x in from_landmarks.state_dict().items())


def test_a_run_is_resumed_with_the_memory_that_it_began_with(tmp_path: Path, book: Path) -> None:
    run(tmp_path, book, MEMORIES["infini"])
    for other in (None, MEMORIES["infini-linear"]):
        config = TrainConfig(tmp_path, MODEL, stages(), memory=other)
        with pytest.raises(InvalidConfig, match=r"begun with another .*'infini', 'segment': 32"):
            train(config, [book], resume=True)


def test_the_command_trains_a_memory_and_remembers_which(tmp_path: Path, book: Path) -> None:
    def command(*arguments: str) -> Any:
        return CliRunner().invoke(
            app, ["train", str(book), "--out", str(tmp_path / "run"), *arguments]
        )

    assert command("--memory", "hopfield").exit_code == 2
    done = command("--memory", "none", "--minutes", "0.0001")
    assert done.exit_code == 0, done.output
    assert load_rival(tmp_path / "run").transformer.memory_config.kind == "none"
    assert command("--resume", "--minutes", "0.0001").exit_code == 0
    refused = command("--resume", "--memory", "landmark")
    assert refused.exit_code == 1
    assert "begun with another model or memory" in " ".join(refused.output.split())
