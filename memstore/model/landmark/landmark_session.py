"""A session of a landmark model: tokens go in chunk by chunk, attend to the chunk and to memory,
and finished blocks become memory themselves.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memstore.errors import BudgetExceeded
from memstore.model.landmark.attention.memory_attention import MemoryAttention, SpeculativePrefetch
from memstore.model.landmark.attention.open_chunk import FinishedBlocks
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session import AskSession, OnRead, OwnBlocks, SessionBlocks, check_device
from memstore.store.memory_store import MemoryStore

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
