"""What a run goes on with when it is resumed, and what one that begins does not take from one that
was killed.
"""

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from typer.testing import CliRunner

from memstore.cli.main import app
from memstore.errors import InvalidWeights
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import read_configuration
from memstore.model.landmark.config import PRESETS
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.subject import TrainConfig
from memstore.training.train import train
from support.small_config import MODEL
from support.small_training import small

LARGER = replace(MODEL, num_layers=3, mlp_size=64, memory_layers=(2,))


def stages() -> tuple[Stage, ...]:
    windows, _, memory, *_ = default_curriculum()
    return small(windows, batch=2), small(memory, batch=2, memory_blocks=3)


@pytest.fixture
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "test", MODEL)
    monkeypatch.setitem(PRESETS, "books", LARGER)
    monkeypatch.setattr("memstore.training.curriculum.default_curriculum", stages)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, of other words."""
    found = [tmp_path_factory.mktemp("text") / name for name in ("some.txt", "more.txt")]
    for part, path in enumerate(found):
        path.write_text("\n".join(sorted(topics.values())[part:50:2])[:40_000])
    return found


def config(out: Path, **settings: Any) -> TrainConfig:
    settings = {"stages": stages(), "precision": "float32", "seed": 3, "log_every": 1, **settings}
    return TrainConfig(out, MODEL, **settings)


def killed(run: TrainConfig, book: Path) -> None:
    """Begin a run that ends before its first state is saved."""

    def stop(line: dict[str, Any]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        train(run, [book], report=stop)
    assert {path.name for path in run.out.iterdir()} >= {"tokenizer.json", "tokens"}
    assert not (run.out / "state.pt").exists()


@pytest.mark.usefixtures("_presets")
def test_the_command_resumes_a_run_in_its_own_shape(tmp_path: Path, books: list[Path]) -> None:
    def command(out: str, *arguments: str) -> Any:
        given = ["train", str(books[0]), "--out", str(tmp_path / out), "--precision", "float32"]
        return CliRunner().invoke(app, [*given, *arguments])

    def refused(why: str, out: str, *arguments: str) -> None:
        told = command(out, "--resume", *arguments)
        assert told.exit_code == 1 and why in " ".join(told.output.split()), told.output

    begun = command("run", "--preset", "books", "--minutes", "0.0001")
    assert begun.exit_code == 0, begun.output
    resumed = command("run", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert read_configuration(tmp_path / "run") == LARGER
    refused("begun with another model (num_layers 3, mlp_size 64", "run", "--preset", "test")

    weights = str(tmp_path / "run")
    assert command("of", "--init", weights, "--minutes", "0.0001").exit_code == 0
    resumed = command("of", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert read_configuration(tmp_path / "of") == LARGER


def test_a_run_takes_no_tokenizer_of_a_run_that_was_killed(
    tmp_path: Path, books: list[Path]
) -> None:
    some, more = books
    fresh, again, started = (config(tmp_path / name) for name in ("fresh", "again", "started"))

    def tokenizer(run: TrainConfig) -> str:
        return Tokenizer.load(run.out / "tokenizer.json").fingerprint

    train(fresh, [some])
    killed(again, more)
    killed(started, more)
    assert tokenizer(again) == tokenizer(started) != tokenizer(fresh)
    train(again, [some])  # makes its own
    train(replace(started, init=fresh.out), [more])  # takes that of the weights
    given = config(tmp_path / "given", tokenizer=fresh.out / "tokenizer.json")
    train(given, [more])
    assert {tokenizer(run) for run in (again, started, given)} == {tokenizer(fresh)}


def test_a_run_without_its_tokenizer_is_not_resumed_with_another(
    tmp_path: Path, books: list[Path]
) -> None:
    train(config(tmp_path), books)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidWeights, match=r"cannot read .*tokenizer\.json"):
        train(config(tmp_path), books, resume=True)
