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
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.checkpoint import read_configuration
from memstore.model.config import PRESETS, ModelConfig
from memstore.model.tokenizer import Tokenizer
from memstore.training.curriculum import Stage, default_curriculum
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
LARGER = replace(MODEL, num_layers=3, mlp_size=64, memory_layers=(2,))


def stages() -> tuple[Stage, ...]:
    windows, _, memory, *_ = default_curriculum()
    small: dict[str, Any] = {"steps": 2, "batch": 2, "blocks": 3, "chunk_blocks": 2, "warmup": 1}
    small |= {"memory_windows": 4, "memory_blocks": 3, "queue": 16, "negatives": 1.0}
    return replace(windows, **small), replace(memory, **small)


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
        path.write_text("\n".join(sorted(topics.values())[part::2]))
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
@pytest.mark.parametrize("memory", ["landmark", "transformer-xl"])
def test_the_command_resumes_a_run_in_its_own_shape(
    tmp_path: Path, books: list[Path], memory: str
) -> None:
    def command(out: str, *arguments: str) -> Any:
        given = ["train", str(books[0]), "--out", str(tmp_path / out), "--precision", "float32"]
        return CliRunner().invoke(app, [*given, *arguments])

    def refused(why: str, out: str, *arguments: str) -> None:
        told = command(out, "--resume", *arguments)
        assert told.exit_code == 1 and why in " ".join(told.output.split()), told.output

    begun = command("run", "--preset", "books", "--memory", memory, "--minutes", "0.0001")
    assert begun.exit_code == 0, begun.output
    resumed = command("run", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert read_configuration(tmp_path / "run")[0] == LARGER
    refused("begun with another model (num_layers 3, mlp_size 64", "run", "--preset", "test")

    weights = str(tmp_path / "run")
    assert command("of", "--init", weights, "--minutes", "0.0001").exit_code == 0
    resumed = command("of", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert read_configuration(tmp_path / "of")[0] == LARGER

    (tmp_path / "run" / "config.json").unlink()  # as one that is killed in its first save
    refused("was begun", "run", "--memory", memory)
    assert command("run", "--resume", "--memory", memory, "--preset", "books").exit_code == 0


def test_a_run_is_resumed_in_the_shape_it_began_with(tmp_path: Path, books: list[Path]) -> None:
    own = replace(MODEL, top_k=1)
    train(replace(config(tmp_path), model=own), books)
    with pytest.raises(InvalidConfig, match=r"another model \(num_layers 2, mlp_size 48, memory_l"):
        train(replace(config(tmp_path), model=LARGER), books, resume=True)
    train(config(tmp_path), books, resume=True)
    assert read_configuration(tmp_path)[0] == own
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="in another shape; name that with --preset"):
        train(replace(config(tmp_path), model=LARGER), books, resume=True)


def test_weights_come_with_their_tokenizer_whatever_a_killed_run_left(
    tmp_path: Path, books: list[Path]
) -> None:
    some, more = books
    first, out = config(tmp_path / "first"), config(tmp_path / "out")
    train(first, [some])
    killed(out, more)
    left = Tokenizer.load(out.out / "tokenizer.json")
    train(replace(out, init=first.out), [more])
    its, found = (Tokenizer.load(run.out / "tokenizer.json") for run in (first, out))
    assert found.fingerprint == its.fingerprint != left.fingerprint


def test_a_run_makes_its_own_tokenizer_whatever_a_killed_run_left(
    tmp_path: Path, books: list[Path]
) -> None:
    some, more = books
    found = []
    for name, before in (("fresh", None), ("again", more)):
        run = config(tmp_path / name)
        if before is not None:
            killed(run, before)
        train(run, [some])
        found.append(Tokenizer.load(run.out / "tokenizer.json").fingerprint)
    assert found[0] == found[1]
    given = config(tmp_path / "given", tokenizer=tmp_path / "fresh" / "tokenizer.json")
    train(given, [more])
    assert Tokenizer.load(given.out / "tokenizer.json").fingerprint == found[0]


def test_a_run_without_its_tokenizer_is_not_resumed_with_another(
    tmp_path: Path, books: list[Path]
) -> None:
    train(config(tmp_path), books)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidWeights, match=r"cannot read tokenizer .*tokenizer\.json"):
        train(config(tmp_path), books, resume=True)
