"""Reading a document into a memory: text to tokens to chunks to committed blocks, resumable and in
constant memory.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from memstore.disk.format.citations import append_places, pack_places, unpack_places
from memstore.disk.format.document import Document, IngestSettings
from memstore.errors import MemoryLocked, ReadOnlyMemory, StorageFull
from memstore.freed_memory import return_freed_memory
from memstore.model.adapter import TextTokenizer
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.size_estimate import SizeEstimate
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter

_FREED_EVERY = 1024  # tokens after which freed memory goes back to the system


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
OnForecast = Callable[[SizeEstimate], None]
"""Told what a document will be, before any of it is read."""


class ChunkReader(Protocol):
    """Reads a document's chunks, in order, and gives their blocks to its writer."""

    chunk_tokens: int  # of a whole chunk

    def chunk(self, ids: list[int], characters: int) -> None:
        """Read and stage one chunk, before which the document has so many characters; the last one
        of a document may be shorter.
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


def ingest(
    store: MemoryStore,
    text: Text,
    tokenizer: TextTokenizer,
    settings: IngestSettings,
    begin: Callable[[DocumentWriter], ChunkReader],
    *,
    mode: Mode = "new",
    expect: OnForecast | None = None,
) -> Ingesting:
    """Read a text into the store under text.name, chunk by chunk; the finished document is returned
    (docs/method.md section 6).

    begin: makes what reads chunks, behind what the writer has already. A document already there
    with the same content is returned as it is; one whose ingest was interrupted is resumed. Raises
    InvalidInput for a text that cannot be read, or that changes meanwhile: then the document stays
    unfinished; StorageFull before anything is read, if there is no room for it (where a codec
    compresses and nobody knows how well, after the first commit).
    """
    text.check()
    about = about_tokens(text, tokenizer)
    writer, foreseen = begin_document(store, text, tokenizer, settings, mode, about=about)
    if writer is None:
        return described(store, text)
    with writer:
        foreseen.tell(expect)
        began = time.perf_counter()
        reader = begin(writer)
        number, resumed, base = writer.document.id, writer.tokens, writer.base_tokens
        characters = _characters_before(store, tokenizer, number, resumed)
        total = text.characters + _characters_before(store, tokenizer, number, base)
        first = characters

        def read(ids: list[int]) -> IngestProgress:
            nonlocal characters
            reader.chunk(ids, characters)
            if writer.tokens % _FREED_EVERY < len(ids):
                return_freed_memory()
            characters += tokenizer.characters(ids)
            seconds = time.perf_counter() - began
            left = seconds * (total - characters) / max(1, characters - first)
            foreseen.look_again(writer.document.tokens > resumed)
            return IngestProgress(characters, total, writer.tokens, resumed, seconds, left)

        # An append reads again what stood behind the last full chunk, then the new text; a resumed
        # ingest skips what it has.
        pending = writer.replaced_tokens().ids.tolist()
        skip = max(0, resumed - base)
        for ids in tokenizer.encode_stream(text.pieces()):
            dropped = min(skip, len(ids))
            skip -= dropped
            pending.extend(ids[dropped:])
            done = 0
            while len(pending) - done > reader.chunk_tokens:
                yield read(pending[done : done + reader.chunk_tokens])
                done += reader.chunk_tokens
            del pending[:done]
        if pending:
            yield read(pending)
        return writer.finish()


class Foreseen:
    """How large a document will be."""

    def __init__(self, look: Callable[[], SizeEstimate | None]) -> None:
        """look: finds it. Raises StorageFull where there is no room for it."""
        self._look = look
        self._forecast = look()

    def tell(self, expect: OnForecast | None) -> None:
        """Say so, to who wants to know."""
        if self._forecast is not None and expect is not None:
            expect(self._forecast)

    def look_again(self, committed: bool) -> None:
        """Once some of it is committed, and how well a codec compresses is known, there may be no
        room. Raises StorageFull.
        """
        if committed and self._forecast is not None and self._forecast.most:
            self._forecast = self._look()


def begin_document(
    store: MemoryStore,
    text: Text,
    tokenizer: TextTokenizer,
    settings: IngestSettings,
    mode: Mode,
    *,
    about: int | None,
    stored: Callable[[], int] | None = None,
) -> tuple[DocumentWriter | None, Foreseen]:
    """The writer of a text, None where it is there already, and what it will be; about: how many
    tokens that are, None where nothing is foreseen; stored: counts those that need not be stored
    again, and is asked where there is no room for all. Raises InvalidInput, StorageFull, and what
    MemoryStore.write_document raises.
    """

    def look() -> SizeEstimate | None:
        if about is None:
            return None
        wanted = partial(
            store.estimate_size,
            text.name,
            about,
            source_hash=text.digest,
            settings=settings,
            mode=mode,
        )
        try:
            return wanted()
        except StorageFull:
            if stored is None or mode == "append":
                raise
        return wanted(stored=stored())

    foreseen = Foreseen(look)
    writer = store.write_document(
        text.name,
        source_hash=text.digest,
        settings=settings,
        mode=mode,
        metadata=metadata_of(store, text, tokenizer, mode),
    )
    return writer, foreseen


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


def about_tokens(text: Text, tokenizer: TextTokenizer) -> int:
    """How many tokens a text has, about, by passages of it."""
    sample = text.sample
    tokens = sum(len(tokenizer.encode(passage)) for passage in sample)
    return -(-tokens * text.characters // sum(map(len, sample)))


def characters_of(store: MemoryStore, tokenizer: TextTokenizer, document: Document) -> int:
    """How many characters a document has."""
    if document.settings.passage_tokens is None:
        return _characters_before(store, tokenizer, document.id, document.tokens)
    last = store.passages(document.id, document.blocks - 1) if document.blocks else []
    return sum(one.start + one.characters for one in last) + len(store.tail(document.id))


def _characters_before(
    store: MemoryStore, tokenizer: TextTokenizer, document: int, token: int
) -> int:
    """Characters of a landmark model's document before one of its tokens (or before its end)."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + tokenizer.characters([*span.before.tolist(), *span.ids.tolist()])
