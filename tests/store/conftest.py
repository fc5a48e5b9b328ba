"""A memory of synthetic documents, empty, for the tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.store.memory_store import MemoryStore
from support.synthetic_documents import SIGNATURE


@pytest.fixture
def store(path: Path) -> Iterator[MemoryStore]:
    """A memory at `path`, with a small host tier, since its blocks are tiny."""
    with MemoryStore.create(path, SIGNATURE, host_budget=1 << 20) as opened:
        yield opened
