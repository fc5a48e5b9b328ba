"""A text and a memory of it, for the tests of commands."""

import shutil
from pathlib import Path

import pytest

from support.commands import STORY, run


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story"
    path.write_text(STORY)
    return path


@pytest.fixture(scope="module")
def kept(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory that holds `story`, to be copied."""
    here = tmp_path_factory.mktemp("kept")
    (here / "story").write_text(STORY)
    command = ("ingest", here / "story", "--store", here / "mem", "--model", model_path)
    assert run(*command).status == 0
    return here / "mem"


@pytest.fixture
def store(tmp_path: Path, kept: Path) -> Path:
    """A memory that holds `story`."""
    return shutil.copytree(kept, tmp_path / "mem")
