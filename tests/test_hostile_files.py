"""A memory's directory, and the directory one works in, may be somebody else's: nothing of them is
run, and nothing outside the memory is written, removed or shown.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_documents import SIGNATURE, ingest

from memstore.child import python_command
from memstore.errors import MemstoreError
from memstore.store.memory_store import MemoryStore
from memstore.store.verify import verify_memory

BUDGET = 1 << 20


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A memory of one document."""
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "a", text=1, tokens=100)
    return path


def test_no_child_runs_code_from_the_working_directory_or_the_environments_path(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, named = tmp_path / "here", tmp_path / "named"
    for directory in (here, named):
        directory.mkdir()
        for module in ("lmdb", "json", "numpy", "memstore", "sitecustomize", "usercustomize"):
            trap = f"open({str(tmp_path / 'ran')!r}, 'a').write('{directory.name} {module}')\n"
            (directory / f"{module}.py").write_text(trap + "raise SystemExit(1)\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{named}{os.pathsep}.")
    assert verify_memory(memory).clean
    said = subprocess.run(
        python_command("memstore", "verify", "--store", str(memory)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0 and "Traceback" not in said.stderr
    assert not (tmp_path / "ran").exists()


def test_a_child_that_cannot_start_is_not_called_damage(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(MemstoreError, match="did not start"):
        verify_memory(memory)
