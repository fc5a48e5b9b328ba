"""What the ingest of a document is, whatever model reads it: how far it is, and what the row of one
that is there already says.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from memstore.disk.format.document import Document
from memstore.errors import MemoryLocked, ReadOnlyMemory
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: characters read of all, tokens committed or staged, where it went on
    from, and the seconds that it has been reading since.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int
    seconds: float
    seconds_left: float  # at this speed

    @property
    def tokens_per_second(self) -> float:
        """How fast it reads."""
        return (self.tokens - self.resumed_tokens) / self.seconds


OnProgress = Callable[[IngestProgress], None]
Ingesting = Generator[IngestProgress, None, Document]
"""An ingest chunk by chunk: tells how far it is after each, and returns the finished document.
Closed before its end, it commits what it has, to be resumed.
"""


def finish(ingesting: Ingesting, progress: OnProgress | None = None) -> Document:
    """Go through with an ingest, and return its document."""
    with closing(ingesting):  # at once, and not when it is collected: it holds the writer's lock
        while True:
            try:
                state = next(ingesting)
            except StopIteration as end:
                return end.value
            if progress is not None:
                progress(state)


def described(store: MemoryStore, text: Text) -> Document:
    """The document that is there already; its row says what is known of it by now."""
    document = store.document(text.name)
    metadata = document.metadata | text.metadata
    if metadata == document.metadata:
        return document
    try:
        return store.describe(text.name, metadata)
    except (ReadOnlyMemory, MemoryLocked):
        if text.labels not in (None, document.labels):
            raise
        return document  # it can be asked as it is
