"""Sessions of models of whichever memory, and texts for those that keep no documents."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.baselines.reading import BaselineModel, Reading
from memstore import MemoryStore
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.landmark.landmark_session import LandmarkSession

AnyModel = LandmarkAPI | BaselineModel
AnySession = LandmarkSession | Reading


@contextmanager
def fresh_session(model: AnyModel) -> Iterator[AnySession]:
    """A session before any text."""
    with ExitStack() as open_ones:
        session: AbstractContextManager[AnySession]
        if isinstance(model, BaselineModel):
            session = model.session()
        else:
            store = open_ones.enter_context(MemoryStore.in_memory(model.signature))
            session = model.session(store, [])
        yield open_ones.enter_context(session)


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
        np.savez(self._file, **{name: ids.astype(np.uint16) for name, ids in self.ids.items()})
