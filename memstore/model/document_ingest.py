"""What every ingest of a document needs: its progress, its writer, and what its row says."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from memstore.closing import Closing
from memstore.disk.format.citations import append_places, pack_places, unpack_places
from memstore.disk.format.document import Document, IngestSettings
from memstore.errors import MemoryLocked, ReadOnlyMemory
from memstore.model.adapter import TextTokenizer
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter


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


class IngestWorkers(Closing, ABC):
    """Processes that compute what an ingest needs, for one document after the other."""

    @abstractmethod
    def expect(self, texts: Iterable[Text]) -> None:
        """Which texts will be read in next, the same objects in the same order."""


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


def begin_document(
    store: MemoryStore, text: Text, tokenizer: TextTokenizer, settings: IngestSettings, mode: Mode
) -> DocumentWriter | None:
    """The writer of a text, None where it is there already. Raises what MemoryStore.write_document
    raises.
    """
    return store.write_document(
        text.name,
        source_hash=text.digest,
        settings=settings,
        mode=mode,
        metadata=metadata_of(store, text, tokenizer, mode),
    )


def metadata_of(
    store: MemoryStore, text: Text, tokenizer: TextTokenizer, mode: Mode
) -> dict[str, Any]:
    """What the document's row will say of it: of one that is appended to, the places of both parts,
    and no more that it is a file of a folder.
    """
    if mode != "append" or not store.has(text.name):
        return text.metadata
    there = store.document(text.name)
    characters = characters_of(store, tokenizer, there)
    places = append_places(unpack_places(there.metadata), characters, text.places)
    return {**there.portable().metadata, **pack_places(places)}


def described(store: MemoryStore, text: Text) -> Document:
    """The document that is there already; its row says what is known of it by now."""
    document = store.document(text.name)
    metadata = document.metadata | text.metadata
    if metadata == document.metadata or document.appended_to:
        return document
    try:
        return store.describe(text.name, metadata)
    except (ReadOnlyMemory, MemoryLocked):
        return document  # it can be asked as it is


def characters_of(store: MemoryStore, tokenizer: TextTokenizer, document: Document) -> int:
    """How many characters a document has."""
    if document.settings.passage_tokens is None:
        return characters_before(store, tokenizer, document.id, document.tokens)
    last = store.passages(document.id, document.blocks - 1) if document.blocks else []
    return sum(one.start + one.characters for one in last) + len(store.tail(document.id))


def characters_before(
    store: MemoryStore, tokenizer: TextTokenizer, document: int, token: int
) -> int:
    """Characters of a landmark model's document before one of its tokens (or before its end)."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + tokenizer.characters([*span.before.tolist(), *span.ids.tolist()])
