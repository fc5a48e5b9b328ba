"""Fixtures of tests of publications."""

import pytest

from memstore.share.object_store import ObjectStore
from support.places import WatchedPlace, in_memory
from support.published import publish_all, write


@pytest.fixture
def place() -> WatchedPlace:
    """An empty object store in this process's memory, whose calls are counted."""
    return WatchedPlace(in_memory())


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """The documents of TEXTS, published; no test changes it."""
    path = tmp_path_factory.mktemp("written")
    with write(path / "m", codec="raw") as store:
        return publish_all(store, f"memory://{path}")
