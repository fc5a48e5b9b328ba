"""`python -m benchmarks.gpu` on a CPU with tiny sizes: every part runs, a killed call is continued,
and a failing case stops no other.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.fake_device import FakeDevice
from support.forked import forked
from support.paths import ROOT

pytest.importorskip("triton")
pytest.importorskip("transformers")

from benchmarks.gpu import correct
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.part import Setting


def begun(out: Path) -> "subprocess.Popen[str]":
    """The command, as a fork of this process, which has imported everything."""
    words = ["--device", "cpu", "--tiny", "--seconds", "9999", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "text": True}
    return forked(main, ["benchmarks.gpu", *words], **options)


def told(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return content


def test_every_part_runs_on_a_cpu_and_a_killed_call_is_continued(tmp_path: Path) -> None:
    with begun(tmp_path) as first:
        while not (tmp_path / "gpu.json").exists() or "softmax" not in told(tmp_path)["parts"]:
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
    before = told(tmp_path)["parts"]["correct"]
    with begun(tmp_path) as second:
        said, _ = second.communicate()
    assert second.returncode == 0
    content = told(tmp_path)
    assert content["parts"]["correct"] == before and len(content["machines"]) == 2
    assert list(content["parts"]) == list(PARTS)
    for name, part in content["parts"].items():
        assert "error" not in part and list(part["found"]) == part["cases"], name
        for case, found in part["found"].items():
            assert "error" not in found and found["rows"], f"{name}: {case}: {found}"
            assert all(row.get("right", True) for row in found["rows"]), found
    table = (tmp_path / "gpu.md").read_text()
    assert table in said and "no number here is a GPU's" in table
    assert table.count("\n| ") == 1 + sum(  # and the head
        len(found["rows"]) for part in content["parts"].values() for found in part["found"].values()
    )


def test_the_last_line_of_pytest_becomes_a_row() -> None:
    (row,) = correct.tested("version", ["--version"])
    assert row.right and row.note.startswith("pytest ")


def test_passages_on_a_device_match_the_cpu() -> None:
    with FakeDevice():
        rows = list(correct.passages(Setting("cuda", tiny=True), 16))
    assert len(rows) == 2 and all(row.right for row in rows), rows
