"""Sessions of a landmark model, and its ingest of documents. Text is read chunk by chunk: a chunk
attends to itself and to memory, and its finished blocks become memory.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from memstore.errors import BudgetExceeded
from memstore.model.landmark.memory_attention import MemoryAttention
from memstore.model.landmark.open_chunk import FinishedBlocks, SessionBlocks
from memstore.model.landmark.transformer import LandmarkReader
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session import AskSession, OnRead, check_device
from memstore.model.source_text import Text
from memstore.model.tokenizer import Tokenizer
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter


class ChunkSession(AskSession):
    """An open chunk and the blocks before it.

    `feed` takes content tokens; landmarks are inserted after every block_size of them.
    """

    reader: LandmarkReader

    def __init__(
        self,
        reader: LandmarkReader,
        settings: LookupSettings,
        store: MemoryStore,
        blocks: SessionBlocks,
        *,
        retrieve: bool = True,
    ) -> None:
        """retrieve: see MemoryAttention.

        Raises BudgetExceeded if the top tier cannot hold the units of one row, InvalidConfig for a
        store on another device.
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
        self.attention = MemoryAttention(reader, settings, store, blocks, retrieve=retrieve)
        self.lookups = self.attention.lookups
        self.content = 0  # content tokens in the open chunk

    def keep(self, blocks: FinishedBlocks) -> None:
        """Add a chunk's finished blocks to the session's memory; in an ingest, to its document."""

    def close(self) -> None: ...

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
        self.attention.chunk.length += len(sequence)
        return hidden

    @torch.no_grad()
    def end_chunk(self) -> FinishedBlocks:
        """Move the open chunk's complete blocks into the session's own; an unfinished block stays
        and opens the next chunk.
        """
        blocks = self.attention.chunk.finished()
        count = len(blocks[0][0])
        if count:
            self.keep(blocks)
            self.blocks.own_end += count
            self.attention.chunk.drop_finished(blocks)
            self.attention.start_chunk()
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

    # One token, in a forward pass that other sessions' tokens share: session.read_pending

    @torch.no_grad()
    def begin_token(self) -> bool:
        """Make room for a token; False if it ends a block: its landmark must be read with it."""
        if self.content >= self.chunk_tokens:
            self.end_chunk()
        return (self.content + 1) % self.reader.shape.block_size != 0

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.attend(layer_idx, q, k, v)

    def enter(self, layer_idx: int, states: Tensor) -> None:
        self.attention.enter(layer_idx, states)

    def end_token(self, token: int) -> None:
        self.content += 1
        self.read_tokens += 1
        self.attention.chunk.length += 1


class LandmarkSession(ChunkSession):
    """A session of a memory. Its own blocks are pinned in the host tier until it is closed: at most
    settings.own_blocks, and half of the budget; beyond that the oldest are dropped.
    """

    def __init__(
        self,
        reader: LandmarkReader,
        settings: LookupSettings,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        """documents: attached ones, as (id, blocks). Otherwise as ChunkSession."""
        self._scratch = store.retrieval.session_document()
        blocks = SessionBlocks(documents, own_document=self._scratch.document)
        try:
            super().__init__(reader, settings, store, blocks, retrieve=retrieve)
        except BaseException:
            self.close()
            raise
        self.attention.on_read = on_read
        per_block = reader.shape.num_layers * reader.shape.num_kv_heads
        half = store.tiers.host.capacity // (2 * per_block)
        most = max(settings.chunk_blocks + settings.top_k, half)
        self._most = most if settings.own_blocks is None else min(most, settings.own_blocks)

    def keep(self, blocks: FinishedBlocks) -> None:
        count, scratch = len(blocks[0][0]), self._scratch
        surplus = self.blocks.own + count - self._most
        if surplus > 0:
            self.blocks.own_first += surplus
            scratch.trim(self.blocks.own_first)
        for layer, (k, v, landmarks) in blocks.items():
            scratch.add(layer, k, v, landmarks)
        only_recent = [layer for layer in blocks if layer not in self.reader.shape.memory_layers]
        scratch.trim(self.blocks.own_end + count - self.settings.top_k, only_recent)

    def close(self) -> None:
        self._scratch.close()


# Ingest: a session whose own blocks are the document's


def read_chunks(
    reader: LandmarkReader,
    settings: LookupSettings,
    store: MemoryStore,
    text: Text,
    writer: DocumentWriter,
) -> Iterator[tuple[int, int]]:
    """Read a text into a document chunk by chunk, from the writer's position; yields the character
    range of each (docs/appendix/method.md section 6).
    """
    blocks = SessionBlocks(own_document=writer.document.id, own_end=writer.blocks)
    session = ChunkSession(reader, settings, store, blocks, retrieve=False)
    if writer.blocks:
        for layer in range(reader.shape.num_layers):
            landmarks = writer.recent_landmarks(layer, settings.top_k)
            session.attention.chunk.remember(layer, landmarks)
        session.attention.start_chunk()
    tokenizer = reader.tokenizer
    for ids, before in _chunks(tokenizer, text.content, writer.tokens, session.chunk_tokens):
        session.feed(ids)
        last = session.close_block() or None  # a shorter last chunk is closed by a landmark
        writer.add_chunk(ids, before, session.end_chunk(), length_of_last=last)
        yield before, before + tokenizer.characters(ids)


def _chunks(
    tokenizer: Tokenizer, text: str, skip: int, size: int
) -> Iterator[tuple[list[int], int]]:
    """Chunks of so many tokens, the last of at least one, of all but the first `skip` tokens of a
    text; each with the characters before it.
    """
    pending, before = list[int](), 0
    for segment in tokenizer.segments(text):
        ids = tokenizer.encode(segment)
        dropped = min(skip, len(ids))
        skip -= dropped
        before += tokenizer.characters(ids[:dropped])
        pending += ids[dropped:]
        while len(pending) > size:
            chunk, pending = pending[:size], pending[size:]
            yield chunk, before
            before += tokenizer.characters(chunk)
    if pending:
        yield pending, before
