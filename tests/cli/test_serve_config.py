"""`memstore serve --config FILE`: options from TOML, each as the command line would give it."""

from pathlib import Path
from typing import Any

import pytest

from memstore.serve.service import Service
from support.commands import refused, run

pytestmark = pytest.mark.usefixtures("the_model")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each server was told that would have been started."""
    told: list[dict[str, Any]] = []

    def run(service: Service, ready: object) -> None:
        told.append({**vars(service.settings), "store": service.store.path})

    monkeypatch.setattr("memstore.serve.http.run.serve", run)
    return told


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMSTORE_STORE", raising=False)
    return tmp_path / "memory.toml"


def test_a_file_sets_options_and_the_command_line_wins(
    config: Path, started: list[dict[str, Any]]
) -> None:
    config.write_text(
        'store = "kept"\nport = 8000\nmax-body = "1MB"\nmax_json = 4096\nallow-host = ["a", "b"]\n'
        'grace = 5\nmetrics = true\nhost-budget = "64MB"\n'
    )
    assert run("serve", "--config", config).status == 0
    assert run("serve", "--port", "9000", "--allow-host", "c", "--config", config).status == 0
    first, second = started
    assert first["store"] == config.parent / "kept" and first["metrics"] is True
    assert (first["port"], first["body_bytes"], first["json_bytes"]) == (8000, 1_000_000, 4096)
    assert (first["hosts"], first["grace"]) == (("a", "b"), 5)
    assert (second["port"], second["hosts"], second["body_bytes"]) == (9000, ("c",), 1_000_000)


def test_a_file_goes_before_the_environment_and_that_before_the_default(
    config: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_STORE", "of-the-environment")
    config.write_text("port = 8000\n")
    assert run("serve", "--config", config).status == 0
    config.write_text('store = "of-the-file"\n')
    assert run("serve", "--config", config).status == 0
    assert run("serve").status == 0  # nothing is left of a file that was read before
    names = ["of-the-environment", str(config.parent / "of-the-file"), "of-the-environment"]
    assert [str(told["store"]) for told in started] == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 8000", "no option 'prot'; did you mean port?"),
        ("config = 'other.toml'", "no option 'config'"),
        ("help = true", "no option 'help'"),
        ("[server]\nport = 8000", "no option 'server'"),
        ("port = '8000'", "port takes a whole number, not '8000'"),
        ("port = true", "port takes a whole number, not True"),
        ("port = 99999", "port: "),
        ("metrics = 1", "metrics takes true or false, not 1"),
        ("host = 1", "host takes a text, not 1"),
        ("allow-host = 'memory.lan'", "allow-host takes a list, each of it a text"),
        ("allow-host = [1]", "allow-host takes a text, not 1"),
        ("max-body = 'much'", "max-body: "),
        ("max-body = true", "max-body takes a text or a number"),
        ("model = 2026-01-01", "model takes a text"),
        ("active = 0", "active: "),
        ("grace = nan", "grace: "),
        ("policy = 'fifo'", "'fifo' is unknown"),
        ("prefetch = 'all'", "'all' is unknown"),
        ("index = 'flat'", "'flat'"),
        ("deadline = 0", "deadline must be above 0"),
        ("at-least = 0", "at-least: "),
        ("port = ", "Invalid value"),
        ("a = '\udcff'", "utf-8"),
        (None, "No such file"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_its_name(
    config: Path, started: list[dict[str, Any]], text: str | None, said: str
) -> None:
    if text is not None:
        config.write_bytes(text.encode(errors="surrogateescape"))
    result = run("serve", "--config", config)
    refused(result, f"{config}: ", said, status=2)
    assert result.err.endswith("(see memstore serve --help)\n") and not started
    assert not (config.parent / "memory").exists()
