"""Training runs are the same on every device and resume on another; a new run uses nothing of a
killed one.
"""

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from memstore import devices
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.landmark.landmark_model import load_checkpoint
from memstore.model.tokenizer import Tokenizer
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.train import Precision, TrainConfig, train
from support.small_training import MODEL, small, train_in_turns


def stages() -> tuple[Stage, ...]:
    """Both kinds, with the gate, negatives of earlier steps and chunks that continue a window."""
    windows, _, memory, text, *_ = default_curriculum()
    gated = small(text, data=replace(text.data, question_follows=0.5))
    return small(windows, cmt=True), small(memory), gated


def trained(
    out: Path, book: Path, *devices: str, precision: Precision = "float32"
) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a run that is interrupted after every second step and resumed on the
    next device.
    """
    config = TrainConfig(out, MODEL, stages(), seed=3, log_every=1, precision=precision)
    turns = [replace(config, device=device) for device in devices]
    losses, model = train_in_turns(turns, [book], every=2)
    return losses, model.state_dict()


def same(
    found: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]
) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    torch.testing.assert_close(found[1], expected[1])


def test_training_gives_the_same_on_every_device_and_resumes_on_another(
    tmp_path: Path, book: Path
) -> None:
    expected = trained(tmp_path / "here", book, "cpu")
    assert len(expected[0]) == 6
    same(trained(tmp_path / "moved", book, "cuda", "cpu", "cuda"), expected)
    state = torch.load(tmp_path / "moved" / "state.pt", weights_only=True)
    tensors = [x for x in tree_leaves(state) if isinstance(x, torch.Tensor)]
    assert tensors and not any(getattr(x, "elsewhere", False) for x in tensors)
    torch.testing.assert_close(load_checkpoint(tmp_path / "moved")[0].state_dict(), state["model"])


@pytest.mark.parametrize("gain,chosen", [(1.1, "float32"), (2.0, "bfloat16")])
def test_training_takes_the_faster_precision_and_keeps_it(
    tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch, gain: float, chosen: str
) -> None:
    said: list[str] = []

    def report(line: dict[str, Any]) -> None:
        if "loss" in line:
            raise KeyboardInterrupt  # one step is enough
        said.append(line["precision"])

    config = TrainConfig(tmp_path / "run", MODEL, stages()[:1], log_every=1, save_every=1)
    for cpu_gain in (gain, 1 / gain):  # on another machine it stays at its first value
        monkeypatch.setattr(devices, "bfloat16_gain", lambda found=cpu_gain: found)
        with pytest.raises(KeyboardInterrupt):
            train(config, [book], resume=bool(said), report=report)
    assert said == [chosen, chosen]


def test_the_faster_precision_is_measured_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, threads = torch.nn.functional.linear, torch.get_num_threads()
    seen = list[int]()

    def measured(*operands: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return linear(*operands)

    monkeypatch.setattr(torch.nn.functional, "linear", measured)
    torch.set_num_threads(2)
    try:
        devices.bfloat16_gain.__wrapped__()
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_on_a_gpu_is_near_that_on_the_cpu(
    tmp_path: Path, book: Path, precision: Precision
) -> None:
    expected, _ = trained(tmp_path / "here", book, "cpu")
    found, _ = trained(tmp_path / "there", book, "cuda:0", "cpu", "cuda:0", precision=precision)
    assert found == pytest.approx(expected, abs=0.02)


# Resumed and killed runs

LARGER = replace(MODEL, num_layers=3, mlp_size=64, memory_layers=(2,))


def short_stages() -> tuple[Stage, ...]:
    windows, _, memory, *_ = default_curriculum()
    return small(windows, batch=2), small(memory, batch=2, memory_blocks=3)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, of other words."""
    found = [tmp_path_factory.mktemp("text") / name for name in ("some.txt", "more.txt")]
    for part, path in enumerate(found):
        path.write_text("\n".join(sorted(topics.values())[part:50:2])[:40_000])
    return found


def config(out: Path, **settings: Any) -> TrainConfig:
    usual = {"stages": short_stages(), "precision": "float32", "seed": 3, "log_every": 1}
    return TrainConfig(out, MODEL, **usual | settings)


def killed(run: TrainConfig, book: Path) -> None:
    """Begin a run that ends before its first state is saved."""

    def stop(line: dict[str, Any]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        train(run, [book], report=stop)
    assert {path.name for path in run.out.iterdir()} >= {"tokenizer.json", "tokens"}
    assert not (run.out / "state.pt").exists()


def test_a_new_run_does_not_use_the_tokenizer_of_a_killed_run(
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
    train(replace(started, init=fresh.out), [more])  # takes the one of the weights
    other = replace(started, out=tmp_path / "other", model=LARGER, init=fresh.out)
    with pytest.raises(InvalidConfig, match="another architecture"):
        train(other, [more])
    given = config(tmp_path / "given", tokenizer=fresh.out / "tokenizer.json")
    train(given, [more])
    assert {tokenizer(run) for run in (again, started, given)} == {tokenizer(fresh)}
    (fresh.out / "tokenizer.json").unlink()  # a run is resumed with no other
    with pytest.raises(InvalidWeights, match=r"cannot read .*tokenizer\.json"):
        train(fresh, [some], resume=True)
