"""Sessions of models of whichever memory, and texts for those that keep no documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.reading import BaselineModel, Reading
from memstore import MemoryStore
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.landmark.landmark_session import LandmarkSession

AnyModel = LandmarkModel | BaselineModel
AnySession = LandmarkSession | Reading


@contextmanager
def fresh_session(model: AnyModel) -> Iterator[AnySession]:
    """A session before any text."""
    if isinstance(model, BaselineModel):
        with model.session() as reading:
            yield reading
    else:
        with MemoryStore.in_memory(model.signature) as store, model.session(store, []) as session:
            yield session


class Texts:
    """The ids of documents, by name, in a file of a directory."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "texts.npz"
        self.ids: dict[str, np.ndarray] = {}
        if self._file.exists():
            with np.load(self._file) as stored:
                self.ids = {name: stored[name].astype(np.int64) for name in stored.files}

    def save(self) -> None:
        """Write them."""
        arrays: dict[str, Any] = {name: ids.astype(np.uint16) for name, ids in self.ids.items()}
        np.savez(self._file, **arrays)
