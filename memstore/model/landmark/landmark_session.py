"""A landmark model reads a text chunk by chunk: each chunk attends to itself and to memory, and its
finished blocks become memory. Its sessions, its ingest, and its API.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from memstore.disk.format.document import IngestSettings
from memstore.errors import BudgetExceeded, InvalidInput
from memstore.freed_memory import return_freed_memory
from memstore.model.answer import Ranking
from memstore.model.landmark.landmark_search import search_blocks
from memstore.model.landmark.memory_attention import (
    LandmarkAdapter,
    MemoryAttention,
    SpeculativePrefetch,
)
from memstore.model.landmark.open_chunk import FinishedBlocks
from memstore.model.lookup_settings import AnswerSettings, LookupSettings
from memstore.model.model_api import ModelAPI
from memstore.model.session import (
    AskSession,
    OnRead,
    OwnBlocks,
    SessionBlocks,
    attached,
    check_device,
)
from memstore.model.source_text import Ingesting, IngestProgress, Text, described
from memstore.model.tokenizer import TokenText
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.writer import DocumentWriter

Keep = Callable[[FinishedBlocks], None]
"""Takes a chunk's finished blocks into the session's own memory: the store must be able to lease
them from then on.
"""


class ChunkSession(AskSession):
    """An open chunk, the blocks before it, and how lookups are made.

    `feed` takes content tokens; landmarks are inserted after every block_size of them.
    """

    reader: LandmarkAdapter

    def __init__(
        self,
        reader: LandmarkAdapter,
        settings: LookupSettings,
        store: MemoryStore,
        blocks: SessionBlocks,
        keep: Keep,
        *,
        retrieve: bool = True,
    ) -> None:
        """retrieve: see MemoryAttention.

        Raises BudgetExceeded if the top tier cannot hold the units of one row, InvalidConfig if
        it is on another device.
        """
        shape = reader.shape
        check_device(reader.device, store)
        every_head = settings.granularity == "per_token_per_head"
        needed = settings.top_k * (shape.num_heads if every_head else shape.num_kv_heads)
        if needed > store.tiers.top.capacity:
            raise BudgetExceeded(
                f"the {store.tiers.top.name} budget holds {store.tiers.top.capacity} blocks, and "
                f"one token reads up to {needed}; raise the budget"
            )
        self.reader, self.settings, self.store, self.blocks = reader, settings, store, blocks
        self._keep = keep
        self.attention = MemoryAttention(reader, settings, store, blocks, retrieve=retrieve)
        self.lookups = self.attention.lookups
        self._prefetch: SpeculativePrefetch | None = None
        if store.tiers.predictor != "off" and retrieve:
            self._prefetch = SpeculativePrefetch(reader, self.attention, store)
            self.attention.observer = self._prefetch
        self.content = 0  # content tokens in the open chunk
        self.read_tokens = 0

    @property
    def chunk_tokens(self) -> int:
        """Content tokens of a full chunk."""
        return self.settings.chunk_blocks * self.reader.shape.block_size

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        if self.blocks.documents != [*documents]:
            self.blocks.attach(documents)
            self.attention.start_chunk()

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        ids = self.reader.question_ids(question)
        if len(ids) > 1:
            self.feed(ids[:-1])
        answering()
        return self.feed(ids[-1:])[-1]

    def tell(self, question: str, answer: str) -> int:
        reader = self.reader
        ids = [*reader.question_ids(question), *reader.tokenizer.encode(answer)]
        self.feed(ids)
        return len(ids)

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read content tokens -> [n, hidden_size], row i being the state that predicts what follows
        ids[i].
        """
        reader = self.reader
        size = (0, reader.shape.hidden_size)
        states = [torch.zeros(size, dtype=reader.dtype, device=reader.device)]
        self.read_tokens += len(ids)
        start = 0
        while start < len(ids):
            if self.content >= self.chunk_tokens:
                self.end_chunk()
            piece = ids[start : start + self.chunk_tokens - self.content]
            states.append(self._feed_piece(piece))
            start += len(piece)
        return states[1] if len(states) == 2 else torch.cat(states)

    def _feed_piece(self, piece: Sequence[int]) -> Tensor:
        size, sequence, rows = self.reader.shape.block_size, [], []
        for i, token in enumerate(piece, self.content + 1):
            sequence.append(token)
            if i % size == 0:
                sequence.append(self.reader.landmark_id)
            rows.append(len(sequence) - 1)
        self.content += len(piece)
        return self._forward(sequence)[rows]

    def _forward(self, sequence: Sequence[int]) -> Tensor:
        ids = torch.tensor([sequence], device=self.reader.device)
        hidden = self.reader.hidden(ids, self.attend, enter=self.enter)[0]
        self.attention.chunk.advance(len(sequence))
        return hidden

    @torch.no_grad()
    def end_chunk(self) -> FinishedBlocks:
        """Move the open chunk's complete blocks into the session's own; an unfinished block stays
        and opens the next chunk.
        """
        blocks = self.attention.chunk.finished()
        count = len(blocks[0][0])
        if count:
            self._keep(blocks)
            self.blocks.own_end += count
            self.attention.drop_finished(blocks)
            self.content %= self.reader.shape.block_size
        return blocks

    @torch.no_grad()
    def close_block(self) -> int:
        """Close an unfinished last block with a landmark that sees its n content tokens; returns n
        (0 = nothing was open).
        """
        size = self.reader.shape.block_size
        n = self.content % size
        if n:
            self.attention.chunk.pad(size - n)
            self.attention.chunk.tail = n
            self._forward([self.reader.landmark_id])
            self.content += size - n
        return n

    # One token, in a forward pass that other sessions' tokens share: memstore.model.batched_forward

    @torch.no_grad()
    def begin_token(self) -> bool:
        """Make room for a token; False for one that ends a block, as its landmark is read with
        it.
        """
        if self.content >= self.chunk_tokens:
            self.end_chunk()
        return (self.content + 1) % self.reader.shape.block_size != 0

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What ModelAdapter.hidden takes: the open chunk goes on, and attends to memory."""
        return self.attention.attend(layer_idx, q, k, v)

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """A layer begins with these states [1, T, hidden_size]."""
        if self._prefetch is not None:
            self._prefetch.enter(layer_idx, states)

    def end_token(self, token: int) -> None:
        """The forward pass is done."""
        self.content += 1
        self.read_tokens += 1
        self.attention.chunk.advance(1)

    def close(self) -> None:
        """Nothing is held: `keep` has the blocks."""


class LandmarkSession(ChunkSession):
    """A session that asks: its own blocks live pinned in the host tier until it is closed, at most
    half of the budget.

    Beyond that the oldest own blocks are let go; length is never an error.
    """

    def __init__(
        self,
        reader: LandmarkAdapter,
        settings: LookupSettings,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        """documents: attached ones, as (id, blocks). Otherwise as ChunkSession."""
        per_block = reader.shape.num_layers * reader.shape.num_kv_heads
        least = settings.chunk_blocks + settings.top_k
        self._own = OwnBlocks(store, documents, per_block, least=least, bound=settings.own_blocks)
        try:
            super().__init__(
                reader, settings, store, self._own.blocks, self._take, retrieve=retrieve
            )
        except BaseException:
            self._own.close()
            raise
        self.attention.on_read = on_read

    def _take(self, blocks: FinishedBlocks) -> None:
        count, scratch = len(blocks[0][0]), self._own.scratch
        self._own.make_room(count)
        for layer, (k, v, landmarks) in blocks.items():
            scratch.add(layer, k, v, landmarks)
        only_recent = [layer for layer in blocks if layer not in self.reader.shape.memory_layers]
        scratch.trim(self.blocks.own_end + count - self.settings.top_k, only_recent)

    def close(self) -> None:
        """Let the session's own blocks go; the documents stay."""
        self._own.close()


_FREED_EVERY = 1024  # tokens of an ingest after which freed memory goes back to the system
# Queries are sampled to build an index
_STRETCHES = 8  # stretches of stored text, each read in its own session
_TOKENS = 192  # tokens of a stretch
_QUESTIONS = 6  # questions after each stretch
_BLOCKS = 32_768  # most blocks that these sessions attend to: queries depend little on the others
_ASKED = ("price", "name", "colour", "age", "number", "owner", "weight", "key")
_OF = ("red fox", "old bridge", "silver lamp", "north gate", "small ship", "stone table")


class LandmarkAPI(ModelAPI, LandmarkAdapter):
    """The API by MemoryAttention in every layer."""

    answering = AnswerSettings()
    codec = "zstd"
    keeps = None

    def ingesting(
        self,
        text: Text,
        store: MemoryStore,
        *,
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


def _characters_before(store: MemoryStore, tokenizer: TokenText, document: int, token: int) -> int:
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
