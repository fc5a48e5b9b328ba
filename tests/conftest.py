"""Fixtures that several files of tests share."""

from collections.abc import Iterator

import pytest
from counting_source import CountingSource
from fork_server import ForkServer


@pytest.fixture(scope="session")
def children() -> Iterator[ForkServer]:
    """Processes of their own, forked from one that has imported everything and opened nothing."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def below() -> CountingSource:
    return CountingSource()
