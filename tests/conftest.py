"""Fixtures shared by several test files."""

import gc
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from memstore.model.landmark.landmark_model import LandmarkModel
    from support.counting_source import CountingSource
    from support.fork_server import ForkServer
    from support.serving import Served

gc.disable()  # until all is imported: a sixth of the collection's time otherwise

# No test decides by time: a machine may take it away.
settings.register_profile(
    "any machine", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A new memory gets the small model that ships unless a test names another one, even if more models
# are installed here. Tests of the default model delete the variable.
os.environ["MEMSTORE_MODEL"] = "books-1m"

DESELECTED = "not models and not services"  # as addopts of pyproject.toml say
DESELECTED_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(models|services)\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    # The process that only hands out tests to others imports neither torch nor Triton.
    runs = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs and find_spec("triton") is not None:  # before transformers imports it
        from support import triton_interpreter  # noqa: F401


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all deselected are not imported: their clients take seconds."""
    if config.option.markexpr != DESELECTED or not collection_path.match("test_*.py"):
        return None
    return True if DESELECTED_FILE.search(collection_path.read_text("utf-8")) else None


@pytest.fixture(scope="session")
def children() -> "Iterator[ForkServer]":
    """Processes of their own, forked from one that has imported everything and opened nothing."""
    from support.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def below() -> "CountingSource":
    from support.counting_source import CountingSource

    return CountingSource()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a memory is made."""
    return tmp_path / "memory"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """One server for the tests of a file: a memory with one document, `diary`, without keys, on
    loopback.

    It is new for each file, as tests may change what its threads call, such as the clock.
    """
    from support.serving import serving

    with serving(tmp_path_factory.mktemp("served") / "mem") as server:
        yield server


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model of random weights."""
    from support.commands import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> "LandmarkModel":
    """A tiny landmark model of random weights."""
    from support.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to train on, which every Python has: pages of the language's reference."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(list(topics.values())[:25])[:30_000])
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny decoder of random weights, which nobody changes."""
    from support.tiny_decoder import saved

    return saved(tmp_path_factory.mktemp("decoder") / "tiny")


@pytest.fixture
def the_model(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tiny model the default of every command."""
    monkeypatch.setenv("MEMSTORE_MODEL", str(model_path))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection looks through it again, nor copies it in a fork."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
