"""Fixtures shared by tests of loading models."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def directory(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny decoder's, of this test alone, with a cache of its own."""
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny, tmp_path / "model"))
