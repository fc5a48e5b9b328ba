"""Lists of small memories: two stages from the first token on, with few passages proposed."""

import pytest

from memstore.store.retrieve import first_stage

PROPOSED = 60


@pytest.fixture
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search in two stages whatever the size."""
    monkeypatch.setattr(first_stage, "PAYING", 1)
    monkeypatch.setattr(first_stage, "PROPOSED", (PROPOSED, PROPOSED))
