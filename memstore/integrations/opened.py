"""A memory and its reader as other people's programs hold them: opened when something is first
looked for, closed with what holds it.
"""

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from memstore.api.memory import Memory
    from memstore.model.answer import Matches, Source
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore


class Opened:
    """A memory of a directory that is only read; or one that is open already, with its reader."""

    def __init__(
        self,
        store: "Memory | MemoryStore | Path | str",
        reader: "ModelAPI | Path | str | None" = None,
    ) -> None:
        """reader: what reads the memory, or its name (None: the one that the memory
        was made with)."""
        given: Any = store
        if hasattr(given, "reader"):  # a Memory, which brings its model
            given, reader = given.store, reader or given.reader
        self._given: MemoryStore | Path | str = given
        self._named = reader
        self._found: tuple[ModelAPI, MemoryStore] | None = None
        self._opening = threading.Lock()

    def get(self) -> "tuple[ModelAPI, MemoryStore]":
        """The reader and the memory. Raises what loading a model and MemoryStore.open raise."""
        with self._opening:
            if self._found is None:
                self._found = self._open()
            return self._found

    def _open(self) -> "tuple[ModelAPI, MemoryStore]":
        from memstore.store.memory_store import MemoryStore

        named, store = self._named, self._given
        by_name = named is None or isinstance(named, str | Path)
        if not isinstance(store, MemoryStore):
            signature = None if by_name else cast("ModelAPI", named).signature
            store = MemoryStore.open(store, signature, read_only=True)
            weakref.finalize(self, store.close)
        if named is None or isinstance(named, str | Path):
            return _reader(store, named), store
        return named, store

    def search(self, phrase: str, documents: Sequence[str] | None, top_k: int) -> "Matches[Source]":
        """The passages where most of a phrase is found: see ModelAPI.search."""
        reader, store = self.get()
        return reader.search(phrase, store, documents=documents, top_k=top_k)


def label(source: "Source") -> str:
    """Where a passage stands, in a line that is its own: diary[195-378]."""
    first, end = source.span
    return f"{source.document}[{first}-{end}]"


def text_of(reader: "ModelAPI", store: "MemoryStore", name: str) -> str:
    """A document as it was read. Raises DocumentNotFound, InvalidInput (only partly read)."""
    from memstore.model.texts.document_text import document_text

    (document,) = store.ready([name])
    return "".join(document_text(reader.tokenizer, store, document))


def _reader(store: "MemoryStore", name: str | Path | None) -> "ModelAPI":
    """The model of a memory: see reader_of; the same again, where it was loaded for another memory
    of the model.
    """
    from memstore.hf.models_by_name import name_of

    where = str(store.place)
    reader = _loaded(name_of(store.signature, where, name))
    reader.signature.check_same(store.signature, where, "ask it with its own model")
    return reader


@lru_cache(maxsize=4)
def _loaded(name: str | Path) -> "ModelAPI":
    from memstore.hf.models_by_name import reader_named

    return reader_named(name)
