"""The memory of a retriever, opened when it is first searched."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.model.answer import Matches, Source


class Opened:
    """A memory that is open already, or is opened read-only at the first search."""

    def __init__(self, store: "Memory | Path | str") -> None:
        """store: its directory or URL, or an open Memory."""
        self._store = store
        self._searching = threading.Lock()  # a Memory is for one thread at a time

    def search(self, phrase: str, documents: Sequence[str] | None, top_k: int) -> "Matches":
        """As Memory.search. Raises also what loading a model and MemoryStore.open raise."""
        with self._searching:
            if isinstance(self._store, str | Path):
                from memstore.memory import open_memory

                self._store = open_memory(self._store, read_only=True)
            return self._store.search(phrase, documents=documents, top_k=top_k)


def label(source: "Source") -> str:
    """Where a passage is, as a unique identifier: diary[195-378]."""
    first, end = source.span
    return f"{source.document}[{first}-{end}]"


def metadata(source: "Source", found: "Matches") -> dict[str, Any]:
    """The document, block, span and place of a passage, and whether anything found answers."""
    parts = source.citation
    names = "document", "block", "span", "place"
    return {name: parts[name] for name in names} | {"answered": found.answered}
