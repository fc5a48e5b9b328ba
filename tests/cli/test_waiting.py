"""How threads wait for each other is settled by who else computes, before torch is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memstore.cli import waiting

SETTLED = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"]


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nothing is settled yet."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in SETTLED:
        monkeypatch.setenv(name, "")  # so that what a test leaves is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("running", "policy"),
    [
        ("0.10 0.20 0.30 1/200 4711\n", None),  # nobody but this one
        ("3.00 0.20 0.30 2/200 4711\n", None),  # one of eight cores
        ("0.10 0.20 0.30 3/200 4711\n", "PASSIVE"),
        ("of another system\n", None),
        (None, None),
    ],
)
def test_threads_sleep_where_others_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str | None, policy: str | None
) -> None:
    path = tmp_path / "loadavg"
    if running is not None:
        path.write_text(running)
    monkeypatch.setattr(waiting, "_RUNNING", path)
    waiting.sleep_where_busy()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize("name", SETTLED)
def test_what_somebody_has_settled_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(waiting, "others_running", lambda: 9.0)
    monkeypatch.setenv(name, "1")
    waiting.sleep_where_busy()
    assert {each: os.environ[each] for each in SETTLED if each in os.environ} == {name: "1"}


def test_the_command_line_settles_it_before_torch_is_loaded() -> None:
    script = (
        "import sys, memstore.__main__ as program\n"
        "program.sleep_where_busy = lambda: print('torch' in sys.modules)\n"
        "sys.argv = ['memstore', '--version']\n"
        "program.main()\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("False\nmemstore ")
