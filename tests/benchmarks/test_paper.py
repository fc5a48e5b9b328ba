"""The paper's tables: which runs they train and resume, and what they count."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines.reading import BaselineModel
from benchmarks.common.intervals import mean_interval
from benchmarks.paper import baselines, figures, tables
from benchmarks.paper import runs as paper_runs
from benchmarks.paper.measures import Measured
from benchmarks.paper.runs import Run, Runs, spent
from benchmarks.paper.scoring import Way, score
from memstore.errors import InvalidInput
from memstore.model.landmark.transformer import PRESETS, ModelConfig
from support.tiny_model import text, tiny_model

TINY = ModelConfig(
    vocab_size=1024,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=24,
    block_size=8,
    chunk_blocks=2,
    top_k=2,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and stages of little text."""
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    real = paper_runs.default_curriculum
    small: dict[str, Any] = {"batch": 2, "blocks": 2, "chunk_blocks": 2}
    small |= {"memory_windows": 4, "memory_blocks": 4, "warmup": 1}
    monkeypatch.setattr(
        paper_runs, "default_curriculum", lambda: [replace(stage, **small) for stage in real()]
    )


def of(directory: Path, book: Path) -> Runs:
    return Runs(directory, {"books": [book]}, "float32")


def test_a_run_is_trained_once_and_resumes_after_an_interrupt(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, began = Run("start", preset="tiny", steps=2), paper_runs.train, []

    def noted(config: Any, texts: Any, **more: Any) -> None:
        began.append(more["resume"])
        real(config, texts, **more)

    def interrupted(*given: Any, **more: Any) -> None:
        noted(*given, **more)
        raise KeyboardInterrupt

    runs = of(tmp_path, book)
    monkeypatch.setattr(paper_runs, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.trained([run])
    assert not runs.finished(run)
    monkeypatch.setattr(paper_runs, "train", noted)
    directory = runs.path(run)
    assert runs.trained([run]) == [directory] and runs.finished(run)
    assert runs.trained([run]) == [directory] and began == [False, True]
    assert spent(directory)["cpu_seconds"] > 0


def test_tables_train_and_measure_each_model_once(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "TABLE_1", [tables.TABLE_1[n] for n in (0, 1, 2)])
    given = ["--books", str(book), "--test", str(book), "--texts", "2", "--steps", "2"]
    options = ["--runs", str(tmp_path), "--preset", "tiny", "--precision", "float32"]

    def printed(module: Any, *more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["paper", *given, *options, *more])
        module.main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    lines = printed(tables)
    assert len(lines) == (2 + 3) + (2 + 3) + (2 + 6)
    assert f"| {tables.blocks(2048) * 8} (2048)" in lines[4] and "14.72" in lines[4]
    few = ["--figures", "3b", "--lengths", "256", "--trials", "2"]
    assert len(printed(figures, *few)) == 2 + 1
    for weights in tmp_path.glob("*/model.safetensors"):
        weights.unlink()  # nothing is read again
    assert printed(tables) == lines


def test_baselines_are_compared_after_training(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> list[str]:
        options = ["--runs", str(tmp_path), "--preset", "tiny", "--precision", "float32"]
        options += ["--books", str(book), "--test", str(book), "--texts", "2", "--steps", "2"]
        monkeypatch.setattr(sys, "argv", ["baselines", *options, *more])
        baselines.main()
        return capsys.readouterr().out.splitlines()

    both = ["--memories", "landmark", "infini"]
    measured = [*both, "--parts", "perplexity", "recall", "--pasts", "0", "64"]
    measured += ["--lengths", "2K", "--trials", "5", "--recall-tokens", "1"]
    with pytest.raises(InvalidInput, match="--parts train"):
        run(*measured)
    run("--parts", "train", "--seeds", "1", *both)
    printed = run(*measured)
    assert "seeds 1" in printed  # of the others nothing is there
    rows = [line.split("|")[1:] for line in printed if line.startswith("| infini")]
    heads, dim = TINY.num_heads, TINY.head_dim
    state = TINY.num_layers * heads * dim * (dim + 1) * 2 / 1024
    assert float(rows[0][4]) == pytest.approx(state, abs=0.5)
    assert len([line for line in printed if line.startswith("| passkey")]) == 2


def test_attended_tokens_and_state_are_counted(tmp_path: Path, book: Path) -> None:
    runs = of(tmp_path, book)
    landmark, cached = (
        Run(name, preset="tiny", steps=2) for name in ("landmark", "transformer-xl")
    )
    runs.trained([landmark, cached])
    models = {run: Measured(runs.path(run), [book]) for run in (landmark, cached)}
    text = models[landmark].books.books[0][:65]
    every = score(models[landmark].model, Way(16, top_k=2, cmt_cutoff=0.0), text)
    # chunks of 16 tokens: 8.5 on the mean. After the first chunk all rows of all layers read two
    # blocks of 8 (the latest two where none is searched)
    assert every.attended == pytest.approx(8.5 + 16 * 3 / 4)
    assert len(every.scores) == 64 and every.skipped == 0
    one_layer = 2 * 8 * (2 * 8 + 1) * 2  # bytes of a block: heads, head_dim, keys and values
    assert every.state == one_layer * (6 + 2)
    model = models[cached].model
    assert isinstance(model, BaselineModel)
    rows = score(model, Way(16, cache=16), text)
    assert rows.attended == pytest.approx(8.5 + 16 * 3 / 4)
    assert rows.state == 2 * 16 * 16 * 2  # layers, tokens, hidden size
    assert model.transformer.memory_config.segment == 16
    later = score(model, Way(16, cache=16), text, begin=49)
    assert later.scores == pytest.approx(rows.scores[-16:], abs=1e-5)
    assert later.attended == pytest.approx(8.5 + 16)


@pytest.mark.parametrize(("values", "t"), [(2, 12.706), (3, 4.303), (6, 2.571), (24, 2.069)])
def test_intervals_of_few_values_use_students_t(values: int, t: float) -> None:
    x = np.linspace(-1.0, 2.0, values)
    middle, low, high = mean_interval(x)
    half = t * x.std(ddof=1) / math.sqrt(values)
    assert middle == pytest.approx(0.5)
    assert (middle - low, high - middle) == pytest.approx((half, half), rel=2e-3)


def test_distinct_blocks_are_counted_by_head(tmp_path: Path) -> None:
    """Heads that choose alone for a chunk read top_k blocks, tokens that choose alone many more."""
    model = tiny_model(tmp_path, num_layers=3)
    ids = np.array(model.tokenizer.encode(text(600))[: 8 * 64])
    everything = figures.distinct_blocks(model, ids, 32, top_k=60, cmt_cutoff=0)
    counts = {key: len(read) for key, read in everything.items()}
    assert counts == {(layer, head): 60 for layer in range(3) for head in range(4)}
    most = {}
    for granularity in ("per_token_per_head", "per_token", "per_head", "shared"):
        found = figures.distinct_blocks(
            model, ids, 32, top_k=4, cmt_cutoff=0, granularity=granularity
        )
        most[granularity] = len(set.union(*(found[2, head] for head in range(4))))
        if granularity == "per_head":
            assert set(map(len, found.values())) == {4}
    assert most["shared"] == 4
    assert most["shared"] < most["per_head"] <= 8 < most["per_token"]
    assert most["per_token"] <= most["per_token_per_head"] <= 60
