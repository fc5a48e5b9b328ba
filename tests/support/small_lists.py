"""Lists of small memories: two stages from the first token on, with few passages proposed."""

import pytest

from memstore.store.retrieve import first_stage

PROPOSED = 60


def search_by_lists(patch: pytest.MonkeyPatch) -> None:
    """Search in two stages whatever the size."""
    patch.setattr(first_stage, "PAYING", 1)
    patch.setattr(first_stage, "PROPOSED", (PROPOSED, PROPOSED))


@pytest.fixture
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    search_by_lists(monkeypatch)
