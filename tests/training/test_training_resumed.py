"""What a run goes on with when it is resumed, and what one that begins does not take from one that
was killed.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from memstore.cli.main import app
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import read_configuration
from memstore.model.landmark.config import PRESETS
from memstore.training import steps, subject
from memstore.training import train as training
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.train import train
from memstore.training.train_config import TrainConfig
from support.small_config import MODEL

Followed = tuple[list[float], dict[str, torch.Tensor]]
LARGER = replace(MODEL, num_layers=3, mlp_size=64, memory_layers=(2,))


def stages() -> tuple[Stage, ...]:
    windows, _, memory, *_ = default_curriculum()
    small: dict[str, Any] = {"steps": 2, "batch": 2, "blocks": 3, "chunk_blocks": 2, "warmup": 1}
    small |= {"memory_windows": 4, "memory_blocks": 3, "queue": 16, "negatives": 1.0}
    return replace(windows, **small), replace(memory, **small)


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """SIGINT is what it is on a terminal: what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture(scope="module")
def whole(books: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """A run that nothing interrupts."""
    return followed(config(tmp_path_factory.mktemp("whole")), books[0])


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

    (tmp_path / "run" / "config.json").unlink()  # as one that is killed in its first save
    refused("was begun", "run")
    assert command("run", "--resume", "--preset", "books").exit_code == 0


def test_a_run_is_resumed_in_the_shape_it_began_with(tmp_path: Path, books: list[Path]) -> None:
    own = replace(MODEL, top_k=1)
    train(replace(config(tmp_path), model=own), books)
    with pytest.raises(InvalidConfig, match=r"another model \(num_layers 2, mlp_size 48, memory_l"):
        train(replace(config(tmp_path), model=LARGER), books, resume=True)
    train(config(tmp_path), books, resume=True)
    assert read_configuration(tmp_path) == own
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
    with pytest.raises(InvalidWeights, match=r"cannot read .*tokenizer\.json"):
        train(config(tmp_path), books, resume=True)


PLACES = ("as the batch is drawn", "before the update", "amid the update", "at the end of a stage")


def interrupting(
    monkeypatch: pytest.MonkeyPatch, place: str, interrupt: Callable[[], None]
) -> None:
    """Have an interrupt come once, in the second step (or before the third)."""
    come = iter([False, True])

    def second(*given: Any) -> None:
        if next(come, False):
            interrupt()

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def interrupted(*given: Any, **more: Any) -> Any:
            second()
            return real(*given, **more)

        monkeypatch.setattr(owner, name, interrupted)

    if place == "as the batch is drawn":
        before(steps.Steps, "_count")  # of which it knows how much to read
    elif place == "before the update":
        before(training, "update")
    elif place == "at the end of a stage":
        next(come)
        before(training._Run, "_next_stage")
    else:
        real = subject.make_optimizers

        def made(*given: Any, **more: Any) -> list[torch.optim.Optimizer]:
            first, *others = real(*given, **more)
            first.register_step_post_hook(second)  # the others' weights have not changed yet
            return [first, *others]

        monkeypatch.setattr(subject, "make_optimizers", made)


def followed(run: TrainConfig, book: Path, *, resume: bool = False) -> Followed:
    """Losses and weights of a run, which goes on if it is interrupted."""
    losses: list[float] = []

    def report(line: dict[str, Any]) -> None:
        losses.extend([line["loss"]] if "loss" in line else [])

    try:
        train(run, [book], resume=resume, report=report)
    except KeyboardInterrupt:
        assert not resume and len(losses) == 2
        losses.extend(followed(run, book, resume=True)[0])
    return losses, load_file(run.out / "model.safetensors")


@pytest.mark.parametrize("place", PLACES)
def test_a_run_interrupted_inside_a_step_ends_with_the_same_bits(
    tmp_path: Path, books: list[Path], whole: Followed, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    interrupted = []

    def interrupt() -> None:
        interrupted.append(True)
        signal.raise_signal(signal.SIGINT)

    interrupting(monkeypatch, place, interrupt)
    losses, weights = followed(config(tmp_path), books[0])
    assert interrupted == [True] and losses == whole[0]
    assert all(torch.equal(weights[name], x) for name, x in whole[1].items())


@pytest.mark.parametrize("place", PLACES)
def test_a_second_interrupt_ends_a_step_at_once_and_leaves_the_checkpoint(
    tmp_path: Path, books: list[Path], whole: Followed, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = config(tmp_path, save_every=1)
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    interrupting(monkeypatch, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run, [books[0]])
    assert signal.getsignal(signal.SIGINT) is before
    state = torch.load(run.out / "state.pt", weights_only=True)
    assert state["progress"]["step"] == (2 if place == "at the end of a stage" else 1)
    followed(run, books[0], resume=True)
    found = load_file(run.out / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in whole[1].items())


def test_an_interrupt_in_the_last_save_is_not_lost(
    tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has more to do must hear of it."""
    real, stage = training._Run.save, len(stages())

    def save(self: Any) -> None:
        if self.progress.stage == stage:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        real(self)

    monkeypatch.setattr(training._Run, "save", save)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path), [books[0]])
    assert (tmp_path / "state.pt").exists()


def test_a_run_trains_outside_the_main_thread(tmp_path: Path, books: list[Path]) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(train, config(tmp_path), [books[0]]).result()
    assert (tmp_path / "state.pt").exists()
