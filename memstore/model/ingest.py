"""Reading a document into a memory: text to tokens to chunks to committed blocks, resumable and in
constant memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from memstore.disk.document import Document, IngestSettings
from memstore.model.chunk import FinishedBlocks
from memstore.model.reader import Reader, TextTokenizer
from memstore.model.session import Session
from memstore.model.session_blocks import SessionBlocks
from memstore.model.settings import LookupSettings
from memstore.model.text import Text
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: characters read of all, tokens committed or staged, and where it went
    on from.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int


def ingest(
    reader: Reader,
    settings: LookupSettings,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    retrieve: bool = False,
    progress: Callable[[IngestProgress], None] | None = None,
) -> Document:
    """Read a text into the store under text.name and return the finished document (docs/method.md
    section 6).

    A document already there with the same content is returned as it is; one whose ingest was
    interrupted is resumed. Raises InvalidInput for a text that cannot be read, or that changes
    meanwhile: then the document stays unfinished.
    """
    text.check()
    writer = store.write_document(
        text.name, source_hash=text.digest, settings=_stored_settings(settings, retrieve), mode=mode
    )
    if writer is None:
        return store.document(text.name)
    with writer:
        document = _DocumentSession(reader, settings, store, writer, retrieve)
        report = progress or (lambda state: None)
        resumed, base = writer.tokens, writer.base_tokens
        before = _characters_before(store, reader.tokenizer, writer.document.id, base)
        total = text.characters + before
        # An append reads again what stood behind the last full chunk, then the new text; a resumed
        # ingest skips what it has.
        pending = writer.replaced_tokens().ids.tolist()
        skip = max(0, resumed - base)
        for ids in reader.tokenizer.encode_stream(text.pieces()):
            dropped = min(skip, len(ids))
            skip -= dropped
            pending.extend(ids[dropped:])
            done = 0
            while len(pending) - done > document.chunk_tokens:
                document.chunk(pending[done : done + document.chunk_tokens])
                done += document.chunk_tokens
                report(IngestProgress(document.characters, total, document.tokens, resumed))
            del pending[:done]
        if pending:
            document.chunk(pending)
        report(IngestProgress(document.characters, total, document.tokens, resumed))
        return writer.finish()


def _stored_settings(settings: LookupSettings, retrieve: bool) -> IngestSettings:
    """What decides the stored bytes, as the document's row keeps it."""
    stored = IngestSettings(
        settings.chunk_blocks, settings.top_k, settings.cmt_cutoff, retrieve=retrieve
    )
    if not retrieve:
        return stored
    return replace(
        stored,
        granularity=settings.granularity,
        score_range=settings.score_range,
        recency=settings.recency,
    )


def _characters_before(
    store: MemoryStore, tokenizer: TextTokenizer, document: int, token: int
) -> int:
    """Characters of a document before one of its tokens (or before its end)."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + tokenizer.characters([*span.before.tolist(), *span.ids.tolist()])


class _DocumentSession:
    """A session whose own blocks are the document's, committed by the writer at chunk ends."""

    def __init__(
        self,
        reader: Reader,
        settings: LookupSettings,
        store: MemoryStore,
        writer: DocumentWriter,
        retrieve: bool,
    ) -> None:
        self._writer, self._tokenizer = writer, reader.tokenizer
        self.tokens = writer.tokens
        self.characters = _characters_before(
            store, reader.tokenizer, writer.document.id, writer.tokens
        )
        blocks = SessionBlocks(own_document=writer.document.id, own_end=writer.blocks)
        self._chunk: list[int] = []
        self._last_length: int | None = None
        self._session = Session(reader, settings, store, blocks, self._keep, retrieve=retrieve)
        self.chunk_tokens = self._session.chunk_tokens
        if writer.blocks:
            attention = self._session.attention
            for layer in range(reader.shape.num_layers):
                attention.chunk.remember(layer, writer.recent(layer, settings.top_k)[2])
            attention.start_chunk()

    def chunk(self, ids: list[int]) -> None:
        """Read one chunk and stage its blocks; the last chunk of a document may be shorter and is
        closed by a landmark.
        """
        self._chunk = ids
        self._session.feed(ids)
        self._last_length = self._session.close_block() or None
        self._session.end_chunk()
        self.tokens += len(ids)
        self.characters += self._tokenizer.characters(ids)

    def _keep(self, blocks: FinishedBlocks) -> None:
        self._writer.add_chunk(
            self._chunk, self.characters, blocks, length_of_last=self._last_length
        )
