"""Opens the memory and model of a retriever when it is first searched."""

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.model.answer import Matches, Source
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore


class Opened:
    """A memory and its model, opened read-only at the first search, or open already.

    A memory that this opens is closed when the object is collected.
    """

    def __init__(
        self,
        store: "Memory | MemoryStore | Path | str",
        reader: "ModelAPI | Path | str | None" = None,
    ) -> None:
        """reader: the model, or its name; None for the one that wrote the memory."""
        given: Any = store
        if hasattr(given, "reader"):  # a Memory has a model of its own
            given, reader = given.store, reader or given.reader
        self._store: MemoryStore | Path | str = given
        self._model = reader
        self._found: tuple[ModelAPI, MemoryStore] | None = None
        self._opening = threading.Lock()

    def search(self, phrase: str, documents: Sequence[str] | None, top_k: int) -> "Matches":
        """The passages most like a phrase, best first: see ModelAPI.search. Raises also what
        loading a model and MemoryStore.open raise.
        """
        with self._opening:
            if self._found is None:
                self._found = self._open()
            model, store = self._found
        return model.search(phrase, store, documents=documents, top_k=top_k)

    def _open(self) -> "tuple[ModelAPI, MemoryStore]":
        from memstore.store.memory_store import MemoryStore

        named, store = self._model, self._store
        by_name = named is None or isinstance(named, str | Path)
        if not isinstance(store, MemoryStore):
            signature = None if by_name else cast("ModelAPI", named).signature
            store = MemoryStore.open(store, signature, read_only=True)
            weakref.finalize(self, store.close)
        if named is None or isinstance(named, str | Path):
            return _model_of(store, named), store
        return named, store


def label(source: "Source") -> str:
    """Where a passage is, as a unique identifier: diary[195-378]."""
    first, end = source.span
    return f"{source.document}[{first}-{end}]"


def _model_of(store: "MemoryStore", name: str | Path | None) -> "ModelAPI":
    """The model of a memory, loaded once for all memories of that model."""
    from memstore.hf.models_by_name import name_of

    where = str(store.place)
    model = _loaded(name_of(store.signature, where, name))
    model.signature.check_same(store.signature, where, "ask it with its own model")
    return model


@lru_cache(maxsize=4)
def _loaded(name: str | Path) -> "ModelAPI":
    from memstore.hf.models_by_name import reader_named

    return reader_named(name)
