"""Fixtures that several files of tests share."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from counting_source import CountingSource
from fork_server import ForkServer

if find_spec("triton") is not None:  # before anything imports Triton, as transformers does
    import triton_interpreter  # noqa: F401


@pytest.fixture(scope="session")
def children() -> Iterator[ForkServer]:
    """Processes of their own, forked from one that has imported everything and opened nothing."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def below() -> CountingSource:
    return CountingSource()
