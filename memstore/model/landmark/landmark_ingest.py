"""Ingest by a landmark model: a session whose own blocks are the document's."""

import time
from collections.abc import Iterable, Iterator

from memstore.disk.format.document import IngestSettings
from memstore.freed_memory import return_freed_memory
from memstore.model.adapter import TextTokenizer
from memstore.model.document_ingest import Ingesting, IngestProgress, described
from memstore.model.landmark.attention.open_chunk import FinishedBlocks
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.landmark.landmark_session import ChunkSession
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session import SessionBlocks
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter

_FREED_EVERY = 1024  # tokens after which freed memory goes back to the system


def ingest_by_landmarks(
    reader: LandmarkAdapter,
    settings: LookupSettings,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
) -> Ingesting:
    """Read a text into the store under text.name, chunk by chunk, resumable and in constant memory;
    the finished document is returned (docs/appendix/method.md section 6).

    A document already there with the same content is returned unchanged; an interrupted ingest is
    resumed. Raises InvalidInput for a text that cannot be read, or that changes meanwhile: then the
    document stays unfinished; StorageFull.
    """
    text.check()
    stored = IngestSettings(settings.chunk_blocks, settings.top_k, settings.cmt_cutoff)
    writer = store.write_document(
        text.name, source_hash=text.digest, settings=stored, mode=mode, metadata=text.metadata
    )
    if writer is None:
        return described(store, text)
    with writer:
        began = time.perf_counter()
        session = _DocumentSession(reader, settings, store, writer)
        tokenizer, resumed, total = reader.tokenizer, writer.tokens, text.characters
        first = characters = _characters_before(store, tokenizer, writer.document.id, resumed)
        tokens = tokenizer.encode_stream(text.pieces())
        for ids in _chunks(tokens, resumed, session.chunk_tokens):
            session.chunk(ids, characters)
            if writer.tokens % _FREED_EVERY < len(ids):
                return_freed_memory()
            characters += tokenizer.characters(ids)
            seconds = time.perf_counter() - began
            left = seconds * (total - characters) / max(1, characters - first)
            yield IngestProgress(characters, total, writer.tokens, resumed, seconds, left)
        return writer.finish()


def _characters_before(
    store: MemoryStore, tokenizer: TextTokenizer, document: int, token: int
) -> int:
    """Characters of a document before one of its tokens, or before its end."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + tokenizer.characters([*span.before.tolist(), *span.ids.tolist()])


def _chunks(tokens: Iterable[list[int]], skip: int, size: int) -> Iterator[list[int]]:
    """Chunks of so many tokens, the last of at least one, of all but the first `skip` tokens."""
    pending: list[int] = []
    for ids in tokens:
        dropped = min(skip, len(ids))
        skip -= dropped
        pending.extend(ids[dropped:])
        done = 0
        while len(pending) - done > size:
            yield pending[done : done + size]
            done += size
        del pending[:done]
    if pending:
        yield pending


class _DocumentSession:
    """A session whose own blocks are the document's, committed by the writer at chunk ends."""

    def __init__(
        self,
        reader: LandmarkAdapter,
        settings: LookupSettings,
        store: MemoryStore,
        writer: DocumentWriter,
    ) -> None:
        self._writer = writer
        blocks = SessionBlocks(own_document=writer.document.id, own_end=writer.blocks)
        self._chunk: tuple[list[int], int] = [], 0
        self._last_length: int | None = None
        self._session = ChunkSession(reader, settings, store, blocks, self._keep, retrieve=False)
        self._session.attention.cmt_values = None  # what is stored does not depend on them
        self.chunk_tokens = self._session.chunk_tokens
        if writer.blocks:
            attention = self._session.attention
            for layer in range(reader.shape.num_layers):
                attention.chunk.remember(layer, writer.recent_landmarks(layer, settings.top_k))
            attention.start_chunk()

    def chunk(self, ids: list[int], characters: int) -> None:
        """Read and stage a chunk, before which the document has so many characters; a shorter last
        one is closed by a landmark.
        """
        self._chunk = ids, characters
        self._session.feed(ids)
        self._last_length = self._session.close_block() or None
        self._session.end_chunk()

    def _keep(self, blocks: FinishedBlocks) -> None:
        self._writer.add_chunk(*self._chunk, blocks, length_of_last=self._last_length)
