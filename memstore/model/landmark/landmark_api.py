"""The API of a landmark model, whose every token and head looks blocks up."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from memstore.disk.format.document import IngestSettings
from memstore.errors import InvalidInput
from memstore.freed_memory import return_freed_memory
from memstore.model.adapter import TextTokenizer
from memstore.model.answer import Ranking
from memstore.model.document_ingest import Ingesting, IngestProgress, described
from memstore.model.landmark.attention.open_chunk import FinishedBlocks
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.landmark.landmark_search import search_blocks
from memstore.model.landmark.landmark_session import ChunkSession, LandmarkSession
from memstore.model.lookup_settings import AnswerSettings, LookupSettings
from memstore.model.model_api import ModelAPI
from memstore.model.session import OnRead, SessionBlocks, attached
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter

_FREED_EVERY = 1024  # tokens after which freed memory goes back to the system
_STRETCHES = 8  # of the memory's text, each read by a session of its own
_TOKENS = 192  # of a stretch
_QUESTIONS = 6  # after each
# that the sampling sessions attend to at most: queries depend little on what else there is
_BLOCKS = 32_768
_ASKED = ("price", "name", "colour", "age", "number", "owner", "weight", "key")
_OF = ("red fox", "old bridge", "silver lamp", "north gate", "small ship", "stone table")


class LandmarkAPI(ModelAPI, LandmarkAdapter):
    """The API by MemoryAttention in every layer."""

    answering = AnswerSettings()
    codec = "zstd"
    keeps = None

    def ingesting(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        keep: str | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting. keep: "kv"; blocks depend on each other, and are computed once,
        one after the other.
        """
        if keep not in (None, "kv"):
            raise InvalidInput(
                "this model's blocks are computed one after the other, and kept: leave keep out"
            )
        text = source if isinstance(source, Text) else Text(source, name)
        settings = self.lookup.changed(**lookup)
        if settings.own_blocks is not None:
            raise InvalidInput(
                "own_blocks bounds a session; a document is stored whole: leave it out"
            )
        return _ingest(self, settings, store, text, mode=mode)

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Sample queries, then build and save the store's index; returns what was built (see
        MemoryStore.build_index).

        Sessions read stretches of the memory's own text and questions in the plain form, and every
        lookup that the gate lets through is a sample: a head whose gate opens at questions only is
        sampled there.

        Raises InvalidInput for a memory without a finished document or an index that builds
        nothing, ReadOnlyMemory, StorageFull.
        """
        ready = [document for document in store.ready(to="index") if document.blocks]
        rng = Random(0)
        attached: list[tuple[int, int]] = []
        blocks = 0
        for document in rng.sample(ready, len(ready)):
            if not attached or blocks + document.blocks <= _BLOCKS:
                attached.append((document.id, document.blocks))
                blocks += document.blocks
        with store.retrieval.sampled_queries():
            for _ in range(_STRETCHES):
                document = rng.choices(ready, [document.tokens for document in ready])[0]
                first = rng.randrange(max(1, document.tokens - _TOKENS))
                with LandmarkSession(self, self.lookup, store, attached) as session:
                    session.feed(store.tokens(document.id, first, first + _TOKENS).ids.tolist())
                    for _ in range(_QUESTIONS):
                        what = f"the {rng.choice(_ASKED)} of the {rng.choice(_OF)}"
                        question = f" What is {what}? {what.capitalize()} is"
                        session.feed(self.tokenizer.encode(question))
        return store.build_index(self.lookup.top_k, progress)

    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        read_all_rows: bool = False,
        **lookup: Any,
    ) -> LandmarkSession:
        """As ModelAPI.session. read_all_rows: on_read is told what every row reads."""
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        session = LandmarkSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)
        session.attention.read_all_rows = read_all_rows
        return session

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranking:
        """As ModelAPI.ranked."""
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        return Ranking(search_blocks(self, store, scope, ids))


# Ingest: a session whose own blocks are the document's


def _ingest(
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
