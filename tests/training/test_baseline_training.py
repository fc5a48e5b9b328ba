"""Training other memories than landmarks: the same texts, resumable runs, distinct checkpoints."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baselines import training as baseline_steps
from benchmarks.baselines.config import MEMORIES, MemoryConfig
from benchmarks.baselines.reading import load_baseline
from benchmarks.baselines.training import BaselineSubject
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.training.batches import MemoryBatch, QuestionBatch
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.train import Subject, TrainConfig, new_model, train
from support.small_training import MODEL, small, train_in_turns


def stages() -> tuple[Stage, ...]:
    windows, _, memory, *_ = default_curriculum()
    return small(windows, blocks=5), small(memory, blocks=5, memory_blocks=3)


def run(
    out: Path, book: Path, memory: MemoryConfig | None, turns: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run that is interrupted after every second step."""
    config = TrainConfig(out, MODEL, stages(), precision="float32", seed=3, log_every=1)
    subject = Subject if memory is None else partial(BaselineSubject, memory)
    losses, model = train_in_turns([config] * turns, [book], every=2, subject=subject)
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("name", ["none", "memorizing", "infini"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, book: Path, name: str) -> None:
    whole, parts = (run(tmp_path / str(n), book, MEMORIES[name], n) for n in (1, 2))
    assert len(whole[0]) == 4 and whole[0] == parts[0]
    assert all(torch.equal(whole[1][n], x) for n, x in parts[1].items())
    kept = load_baseline(tmp_path / "2")
    assert kept.transformer.memory_config == MEMORIES[name].of(MODEL)
    torch.testing.assert_close(dict(kept.transformer.state_dict()), whole[1])
    with kept.session() as reading:
        assert reading.logits(reading.feed(list(range(70)))).isfinite().all()


def test_every_memory_is_shown_the_same_texts(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[torch.Tensor]] = {}
    real = baseline_steps.Steps._drawn_memory

    for name in ("landmark", "infini"):
        seen = drawn[name] = []

        def noted(self: Any, stage: Any, seen: list = seen) -> tuple[MemoryBatch, QuestionBatch]:
            memory, questions = real(self, stage)
            seen.extend([memory.ids, questions.ids, questions.visible])
            return memory, questions

        monkeypatch.setattr(baseline_steps.Steps, "_drawn_memory", noted)
        run(tmp_path / name, book, MEMORIES.get(name))
    assert len(drawn["infini"]) == 6
    tokens = {
        name: [json.loads(line).get("tokens", 0) for line in metrics.read_text().splitlines()[1:]]
        for name in drawn
        for metrics in [tmp_path / name / "metrics.jsonl"]
    }
    # two steps of 4 windows of 5 blocks of 16 tokens; then 4 of 3 blocks, and chunks
    assert tokens["landmark"][:2] == tokens["infini"][:2] == [320, 640]
    assert tokens["landmark"][3] == 640 + 2 * (4 * 3 + 4 * 2) * 16
    assert 0.75 <= (tokens["infini"][3] - 640) / (tokens["landmark"][3] - 640) <= 1
    assert all(map(torch.equal, drawn["infini"], drawn["landmark"]))


def test_another_memory_starts_with_the_layers_of_a_landmark_model(
    tmp_path: Path, book: Path
) -> None:
    _, none = run(tmp_path / "none", book, MEMORIES["none"])
    assert all(
        torch.equal(x, none[name])
        for name, x in new_model(MODEL, tmp_path / "none", 9).state_dict().items()
    )
    config = TrainConfig(tmp_path, MODEL, stages(), init=tmp_path / "none")
    subject = BaselineSubject(MEMORIES["infini"], config, [book], torch.device("cpu"), False)
    begun = {name: p.detach() for name, p in subject.learning.items()}
    assert not begun.pop("memory.gate").any()
    assert begun.keys() == none.keys() and all(torch.equal(begun[n], x) for n, x in none.items())
    run(tmp_path / "learned", book, MEMORIES["infini"])
    with pytest.raises(InvalidWeights, match=r"Unexpected key.*memory\.gate"):
        new_model(MODEL, tmp_path / "learned", 9)
    resumed = replace(config, out=tmp_path / "learned", init=None)
    for other in (Subject, partial(BaselineSubject, MEMORIES["none"])):
        with pytest.raises(InvalidConfig, match=r"begun with another .*'infini', 'segment': 32"):
            train(resumed, [book], resume=True, subject=other)
