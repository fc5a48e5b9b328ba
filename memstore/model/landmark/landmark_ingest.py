"""Reading a document by a reader of trained landmarks: a session whose own blocks are the
document's.
"""

from dataclasses import replace

from memstore.disk.format.document import IngestSettings
from memstore.model.adapter import LandmarkReader
from memstore.model.document_ingest import Ingesting, OnForecast, ingest
from memstore.model.landmark.attention.open_chunk import FinishedBlocks
from memstore.model.landmark.landmark_session import Session
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session_blocks import SessionBlocks
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter


def ingest_by_landmarks(
    reader: LandmarkReader,
    settings: LookupSettings,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    retrieve: bool = False,
    expect: OnForecast | None = None,
) -> Ingesting:
    """`document_ingest.ingest` with this reader; retrieve: attend to retrieved blocks while
    reading, instead of the latest ones.
    """
    return ingest(
        store,
        text,
        reader.tokenizer,
        _stored_settings(settings, retrieve),
        lambda writer: _DocumentSession(reader, settings, store, writer, retrieve),
        mode=mode,
        expect=expect,
    )


def _stored_settings(settings: LookupSettings, retrieve: bool) -> IngestSettings:
    """What decides the stored bytes, as the document's row keeps it."""
    stored = IngestSettings(
        settings.chunk_blocks, settings.top_k, settings.least_cutoff, retrieve=retrieve
    )
    if not retrieve:
        return stored
    return replace(
        stored,
        granularity=settings.granularity,
        score_range=settings.score_range,
        recency=settings.recency,
    )


class _DocumentSession:
    """A session whose own blocks are the document's, committed by the writer at chunk ends."""

    def __init__(
        self,
        reader: LandmarkReader,
        settings: LookupSettings,
        store: MemoryStore,
        writer: DocumentWriter,
        retrieve: bool,
    ) -> None:
        self._writer = writer
        blocks = SessionBlocks(own_document=writer.document.id, own_end=writer.blocks)
        self._chunk: tuple[list[int], int] = [], 0
        self._last_length: int | None = None
        self._session = Session(reader, settings, store, blocks, self._keep, retrieve=retrieve)
        self._session.attention.cmt_values = None  # what is stored does not depend on them
        self.chunk_tokens = self._session.chunk_tokens
        if writer.blocks:
            attention = self._session.attention
            for layer in range(reader.shape.num_layers):
                attention.chunk.remember(layer, writer.recent(layer, settings.top_k)[2])
            attention.start_chunk()

    def chunk(self, ids: list[int], characters: int) -> None:
        """As ChunkReader.chunk; a shorter last one is closed by a landmark."""
        self._chunk = ids, characters
        self._session.feed(ids)
        self._last_length = self._session.close_block() or None
        self._session.end_chunk()

    def _keep(self, blocks: FinishedBlocks) -> None:
        self._writer.add_chunk(*self._chunk, blocks, length_of_last=self._last_length)
