"""A session: tokens go in chunk by chunk, attend to the chunk and to memory, and finished blocks
become memory themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from memstore.errors import BudgetExceeded, InvalidConfig, InvalidInput
from memstore.kernels.api import NEG
from memstore.kernels.products import accumulate
from memstore.model.attention import Blocks, Memory, MemoryAttention, Read
from memstore.model.config import ModelConfig
from memstore.model.predict import Lookahead
from memstore.model.transformer import Transformer
from memstore.store.memory_store import MemoryStore
from memstore.tiers.raw_bits import torch_dtype

Keep = Callable[[Blocks], None]
"""Takes a chunk's finished blocks into the session's own memory: the store must be able to lease
them from then on.
"""


class Session:
    """One reader: an open chunk, a memory, and how lookups are made.

    `feed` takes content tokens; landmarks are inserted after every block_size of them. The config's
    lookup settings (top_k, score_range, cmt_cutoff, granularity) may differ from the model's own.
    """

    def __init__(
        self,
        model: Transformer,
        config: ModelConfig,
        store: MemoryStore,
        memory: Memory,
        keep: Keep,
        *,
        cmt_keys: Sequence[Tensor] | None,
        retrieve: bool = True,
        on_read: Callable[[list[Read]], None] | None = None,
    ) -> None:
        """Raises BudgetExceeded if the top tier cannot hold the units of one row, InvalidConfig if
        it is on another device.
        """
        self._device = model.norm.weight.device
        if store.slot_lengths.device.type != self._device.type:
            raise InvalidConfig(
                f"the model is on {self._device.type} and the memory's blocks on "
                f"{store.slot_lengths.device.type}; "
                f"open the memory with device={str(self._device)!r}, or load the model with the "
                "memory's"
            )
        choosing = (
            config.num_heads if config.granularity == "per_token_per_head" else config.num_kv_heads
        )
        needed = config.top_k * choosing
        if needed > store.capacity:
            raise BudgetExceeded(
                f"the {store.top_tier} budget holds {store.capacity} blocks, and one token reads "
                f"up to {needed}; "
                "raise the budget"
            )
        self.model, self.config, self.store, self.memory = model, config, store, memory
        self._keep = keep
        self._dtype = torch_dtype(config.kv_dtype)
        self.attention = MemoryAttention(
            config,
            model.rope,
            cmt_keys,
            store,
            memory,
            retrieve=retrieve,
            on_read=on_read,
            dtype=model.norm.weight.dtype,
            device=self._device,
        )
        self._lookahead: Lookahead | None = None
        if store.predictor != "off" and retrieve:
            self._lookahead = self.attention.observer = Lookahead(model, self.attention, store)
        self.content = 0  # content tokens in the open chunk

    @property
    def chunk_tokens(self) -> int:
        """Content tokens of a full chunk."""
        return self.config.chunk_blocks * self.config.block_size

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read content tokens -> [n, hidden], row i being the state that predicts what follows
        ids[i].
        """
        states = [self.model.norm.weight.new_zeros(0, self.config.hidden_size)]
        start = 0
        while start < len(ids):
            if self.content >= self.chunk_tokens:
                self.end_chunk()
            piece = ids[start : start + self.chunk_tokens - self.content]
            states.append(self._feed_piece(piece))
            start += len(piece)
        return states[1] if len(states) == 2 else torch.cat(states)

    def _feed_piece(self, piece: Sequence[int]) -> Tensor:
        size, sequence, rows = self.config.block_size, [], []
        for i, token in enumerate(piece, self.content + 1):
            sequence.append(token)
            if i % size == 0:
                sequence.append(self.config.landmark_id)
            rows.append(len(sequence) - 1)
        self.content += len(piece)
        return self._forward(sequence)[rows]

    def _forward(self, sequence: Sequence[int]) -> Tensor:
        enter = None if self._lookahead is None else self._lookahead.enter
        hidden = self.model.hidden(
            torch.tensor([sequence], device=self._device), self.attention.attend, enter
        )[0]
        self.attention.length += len(sequence)
        return hidden

    @torch.no_grad()
    def end_chunk(self) -> Blocks:
        """Move the open chunk's complete blocks into the session's own memory; an unfinished block
        stays and opens the next chunk.
        """
        blocks = self.attention.finished(self._dtype)
        count = len(blocks[0][0])
        if count:
            self._keep(blocks)
            self.memory.own_end += count
            self.attention.drop_finished(blocks)
            self.content %= self.config.block_size
        return blocks

    @torch.no_grad()
    def close_block(self) -> int:
        """Close an unfinished last block with a landmark that sees its n content tokens; returns n
        (0 = nothing was open).
        """
        n = self.content % self.config.block_size
        if n:
            self.attention.pad(self.config.block_size - n)
            self.attention.tail = n
            self._forward([self.config.landmark_id])
            self.content += self.config.block_size - n
        return n

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
    ) -> Iterator[int]:
        """Yield content tokens that follow `state` [hidden], each read back into the session once
        the next one is asked for.

        temperature 0 is greedy; otherwise samples, repeatably under `seed`. stop(token) ends after
        that token.
        """
        if temperature < 0:
            raise InvalidInput(f"temperature must not be negative, is {temperature}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for step in range(max_new_tokens):
            token = self.next_token(state, temperature, generator)
            yield token
            if stop is not None and stop(token):
                return
            if step + 1 < max_new_tokens:
                state = self.feed([token])[-1]

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocab] of states [n, hidden]; landmark and CMT are never
        predicted.
        """
        logits = accumulate(self.model.logits(states))  # float16 has no NEG
        logits[..., self.config.landmark_id :] = NEG
        return logits

    def next_token(
        self, state: Tensor, temperature: float, generator: torch.Generator | None
    ) -> int:
        """The next content token after `state` [hidden]."""
        logits = self.logits(state[None])[0]
        if temperature == 0:
            return int(logits.argmax())
        # where the generator is: the same draw on every device
        weights = (logits / temperature).softmax(-1).cpu()
        return int(torch.multinomial(weights, 1, generator=generator))


class ScratchSession(Session, AbstractContextManager["ScratchSession"]):
    """A session that asks: its own blocks live pinned in the host tier until it is closed, at most
    half of the budget.

    Beyond that the oldest own blocks are let go; length is never an error.
    """

    def __init__(
        self,
        model: Transformer,
        config: ModelConfig,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        *,
        cmt_keys: Sequence[Tensor] | None,
        retrieve: bool = True,
        on_read: Callable[[list[Read]], None] | None = None,
    ) -> None:
        self._scratch = store.scratch()
        memory = Memory(documents, own_document=self._scratch.document)
        per_block = config.num_layers * config.num_kv_heads
        self._most = max(config.chunk_blocks + config.top_k, store.own_capacity // (2 * per_block))
        try:
            super().__init__(
                model,
                config,
                store,
                memory,
                self._take,
                cmt_keys=cmt_keys,
                retrieve=retrieve,
                on_read=on_read,
            )
        except BaseException:
            self._scratch.close()
            raise

    def _take(self, blocks: Blocks) -> None:
        count = len(blocks[0][0])
        surplus = self.memory.own + count - self._most
        if surplus > 0:
            self.memory.own_first += surplus
            self._scratch.trim(self.memory.own_first)
        for layer, (k, v, landmarks) in blocks.items():
            self._scratch.add(layer, k, v, landmarks)
        only_recent = [layer for layer in blocks if layer not in (self.config.memory_layers or ())]
        self._scratch.trim(self.memory.own_end + count - self.config.top_k, only_recent)

    def close(self) -> None:
        """Let the session's own blocks go; the documents stay."""
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
