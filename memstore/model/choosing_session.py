"""A session of a reader that chooses once for a question: the question is read without memory, a
selector chooses blocks, and every memory layer reads them with the question.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.errors import BlocksUnavailable, InvalidConfig, InvalidInput
from memstore.model.chosen import Candidates, Chosen
from memstore.model.compact import CompactAttention, Window, read_beginning, read_separator
from memstore.model.generate import Continuation
from memstore.model.local_text import LocalText
from memstore.model.own_blocks import FoundBlocks
from memstore.model.reader import ChoosingReader
from memstore.model.session_blocks import Run
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped
from memstore.model.units import Lookups, OnRead, Read
from memstore.store.memory_store import MemoryStore


class ChoosingSession(Closing):
    """Local text behind the reader's prefix, and the blocks that it reads now."""

    def __init__(
        self,
        reader: ChoosingReader,
        settings: LookupSettings,
        store: MemoryStore,
        documents: Sequence[tuple[int, int]],
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        """documents: attached ones, as (id, blocks), in the order in which their blocks are read.
        retrieve: choose at every question; otherwise only `read` says what is read.

        Raises InvalidConfig if the memory's blocks are on another device.
        """
        if store.slot_lengths.device.type != reader.device.type:
            raise InvalidConfig(
                f"the model is on {reader.device.type} and the memory's blocks on "
                f"{store.slot_lengths.device.type}; open the memory with "
                f"device={str(reader.device)!r}, or load the model with the memory's"
            )
        self.reader, self.settings, self.store = reader, settings, store
        self.lookups = Lookups()
        self.chosen: list[Chosen] = []  # that are read now, in the order of the text
        self.answered = True  # False: nothing in the memory answers the last question
        self.read_tokens = 0
        self.candidates: Candidates | None = None  # of the last choice; None before the first
        self.absent: set[int] = set()  # documents left out, or blocks of them: not to be had
        self._retrieve, self._on_read = retrieve, on_read
        self._beginning = read_beginning(reader)
        self._most = settings.top_k * (3 if settings.margin else 1)  # blocks read at once
        told = None if on_read is None else self._told
        self._attention = CompactAttention(reader, self._beginning, told)
        size, step = reader.shape.block_size, min(settings.local_blocks, settings.chunk_blocks)
        self._window = Window(settings.local_blocks * size, size, step * size)
        self._local = LocalText(reader, self._beginning, self._window)
        self._question = ""  # the last one, as typed
        self._own = FoundBlocks(store, list(documents), self._block_units)
        if settings.own_blocks is not None:
            self._own.most = min(self._own.most, settings.own_blocks)
        self._separator = read_separator(reader)
        self._spans: list[tuple[int, int]] = []  # of each of the blocks read, the tokens
        self._tiers: list[str] = []  # of each of the units read, where it was

    # The text

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question as the next turn; the state [hidden_size] that its answer begins with.

        answering: called before the step whose last row predicts the answer's first token. Blocks
        that the turn pushes out of the local text leave before the choice, which may choose them;
        so do the first ones of a turn that is longer than what is held.
        """
        ids, words = self.reader.turn_ids(question, first=not self._local.tokens)
        early = max(0, len(ids) - self._window.tokens)
        self.feed(ids[:early])
        ids = ids[early:]
        words = range(max(0, words.start - early), max(0, words.stop - early))
        self._make_room(len(ids))
        if self._retrieve and self._scope:
            self.choose(question, ids, words)
        answering()
        return self.feed(ids)[-1]

    def tell(self, question: str, answer: str) -> int:
        """As AskingSession.tell."""
        ids, _ = self.reader.turn_ids(question, first=not self._local.tokens)
        ids = [*ids, *self.reader.tokenizer.encode(answer)]
        self.feed(ids)
        return len(ids)

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> [n, hidden_size], row i being the state that predicts what follows
        ids[i].
        """
        shape = self.reader.shape
        size = (0, shape.hidden_size)
        states = [torch.zeros(size, dtype=self.reader.dtype, device=self.reader.device)]
        self.read_tokens += len(ids)
        pieces = self._window.pieces(ids, self._attention.local) if ids else []
        for piece in pieces:
            self._make_room(len(piece))
            given = torch.tensor([list(piece)], device=self.reader.device)
            states.append(self.reader.hidden(given, self.attend)[0])
            self._local.extend(piece)
        return states[1] if len(states) == 2 else torch.cat(states)

    def _make_room(self, coming: int) -> None:
        """Have the oldest blocks of the local text leave where so many tokens would be too many:
        from then on they are chosen like those of documents, if anything is.
        """
        surplus = self._window.surplus(self._attention.local, coming)
        if not surplus:
            return
        layers = self._attention.let_go(surplus)
        if not self._retrieve:
            self._local.forget(surplus)
            return
        ids, landmarks = self._local.let_go(surplus)
        self._own.add(self.reader, ids, layers, landmarks)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What Reader.hidden takes: the local text goes on, and attends to what is read."""
        return self._attention.attend(layer_idx, q, k, v)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states [n, hidden_size]."""
        return self.reader.logits(states)

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
    ) -> Continuation:
        """The tokens that follow `state`, until the turn ends: see memstore.model.generate. Every
        settings.choose_every of them blocks are chosen anew.
        """
        return Continuation(
            self,
            state,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            end=self.reader.ends_turn,
            each=self._said,
        )

    def _said(self, number: int) -> None:
        every = self.settings.choose_every
        if every and number and number % every == 0 and self._retrieve:
            self.choose_again()

    # One token, in a walk that other sessions' tokens share: memstore.model.together

    def begin_token(self) -> bool:
        """Make room for a token, which may always share a walk."""
        self._make_room(1)
        return True

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """A layer begins: nothing is done ahead."""

    def end_token(self, token: int) -> None:
        """The walk is done."""
        self._local.extend([token])
        self.read_tokens += 1

    # What is read

    def choose(self, question: str, ids: Sequence[int], words: range) -> list[Chosen]:
        """Choose blocks for a turn that is about to be read, and read them from now on.

        question: as typed; ids: of the turn, `words` those of the question itself. The local turns
        before it are read with it, memory never is. Nothing is read where nothing answers.
        """
        tapped = self._local.look_ahead(ids, words)
        self._question = question
        found = self._choose(tapped, question)
        self.answered = found is not None
        self.read(found or [])
        return self.chosen

    def choose_again(self) -> list[Chosen]:
        """Choose blocks by the last question and all that was read since, and read them from now
        on. What is read stays where nothing answers, and `answered` is the question's.
        """
        if not self._scope:
            return self.chosen
        question = f"{self._question} {self.reader.tokenizer.decode(self._local.said)}"
        found = self._choose(self._local.rows, question)
        if found is not None:
            self.read(found)
        return self.chosen

    def _choose(self, tapped: Tapped, question: str) -> list[Chosen] | None:
        """The blocks that are meant; None where nothing answers."""
        selector, scope, gate = self.reader.selector, self._scope, self.reader.gate
        scores = selector.scores(tapped, question, self.store, scope)
        best = Candidates(scores, selector, tapped, self.store, scope, self.settings.top_k)
        self.candidates = best
        alone = gate is None or gate.answers(scores)
        answers = alone or (gate is not None and gate.answer_together(scores, best.together))
        self.lookups.done += answers
        self.lookups.skipped += not answers
        if not answers:
            return None
        size = self.reader.shape.block_size
        return best.meant(self.settings, size, self._texts, parts=not alone)

    def _texts(self, document: int, first: int, end: int) -> list[str]:
        """The text of each of a document's tokens; none of the session's own."""
        if document == self._own.scratch.document:
            return []
        ids = self.store.tokens(document, first, end).ids.tolist()
        return [self.reader.tokenizer.decode([token]) for token in ids]

    def read(self, blocks: Sequence[Chosen]) -> None:
        """Read these blocks, in this order, from now on; none for reading nothing.

        Raises InvalidInput for more blocks than top_k and those beside them, BudgetExceeded,
        DocumentNotFound, CorruptBlock.
        """
        if len(blocks) > self._most:
            raise InvalidInput(
                f"{len(blocks)} blocks; top_k {self.settings.top_k} and a margin of "
                f"{self.settings.margin} tokens read {self._most} at most"
            )
        try:
            self._read(blocks)
        except BlocksUnavailable as error:
            if not self.store.allow_partial:
                raise
            self.absent |= error.documents
            gone = {(document, block) for document, _, block, _ in error.units}
            self.read([block for block in blocks if (block.document, block.block) not in gone])

    def _read(self, blocks: Sequence[Chosen]) -> None:
        layers = self.reader.shape.memory_layers
        free = self.store.capacity - self._own.blocks.own * self._block_units  # own ones are pinned
        at_once = max(1, free // max(1, len(blocks) * self._kv_heads))
        self._tiers = []
        for first in range(0, len(layers), at_once):
            self._read_layers(blocks, layers[first : first + at_once])
        self.chosen = list(blocks)

    def _read_layers(self, blocks: Sequence[Chosen], layers: Sequence[int]) -> None:
        shape, heads = self.reader.shape, self._kv_heads
        units = [
            BlockKey(block.document, layer, block.block, head)
            for layer in layers
            for block in blocks
            for head in range(heads)
        ]
        with self.store.lease(units) as lease:
            of_blocks = lease.slots[: len(blocks) * heads : heads]
            lengths = self.store.slot_lengths[of_blocks].tolist()
            self._spans = [
                (block.first, length if block.end is None else min(block.end, length))
                for block, length in zip(blocks, lengths)
            ]
            size = (len(layers), len(blocks), heads, shape.block_size, shape.head_dim)
            k, v = (half.index_select(0, lease.slots).view(size) for half in (lease.k, lease.v))
            self._tiers += [lease.fetched.get(slot, lease.tier) for slot in lease.slots.tolist()]
        for row, layer in enumerate(layers):
            between = self._separator[layer] if self._separator else (None, None)
            texts = (self._text(*halves) for halves in zip((k[row], v[row]), between))
            self._attention.remember(layer, *texts)

    def _text(self, blocks: Tensor, separator: Tensor | None) -> Tensor:
        """Blocks [n, Hkv, block_size, D] as one text [Hkv, m, D], with the separator [Hkv, s, D]
        behind it.
        """
        if not len(blocks):
            return blocks.new_zeros(blocks.shape[1], 0, *blocks.shape[3:])
        parts = [block[:, first:end] for block, (first, end) in zip(blocks, self._spans)]
        return torch.cat(parts if separator is None else [*parts, separator.to(blocks)], 1)

    @property
    def _kv_heads(self) -> int:
        return self.reader.shape.num_kv_heads

    @property
    def _block_units(self) -> int:
        return len(self.reader.shape.memory_layers) * self._kv_heads

    @property
    def _scope(self) -> tuple[Run, ...]:
        """What is chosen from: attached documents, then the blocks that left the local text."""
        return self._own.blocks.runs(self._own.blocks.count)

    def _told(self, layer_idx: int, weights: Tensor) -> None:
        """Tell what the last row of a step read in a layer: weights [H, m]."""
        assert self._on_read is not None
        shape = self.reader.shape
        lengths = [end - first for first, end in self._spans]
        weights = weights[:, : sum(lengths)]  # of the blocks; the separator stands behind them
        parts = [part.sum(-1) for part in weights.split(lengths, 1)]
        of_blocks = torch.stack(parts, 1).tolist()
        first = shape.memory_layers.index(layer_idx) * len(self.chosen) * self._kv_heads
        self._on_read(
            [
                Read(
                    layer_idx,
                    head,
                    block.document,
                    block.block,
                    part,
                    self._tiers[first + row * self._kv_heads + head // shape.group],
                )
                for head, of_head in enumerate(of_blocks)
                for row, (block, part) in enumerate(zip(self.chosen, of_head))
            ]
        )

    @property
    def held(self) -> dict[str, int]:
        """How much is held of the session's own text: "local_tokens", and "own_blocks" beside."""
        return {"local_tokens": self._attention.local, "own_blocks": self._own.blocks.own}

    def close(self) -> None:
        """Let go of what is read and of the session's own blocks; the documents stay."""
        self.chosen, self.candidates = [], None
        self._own.close()
        self._attention = CompactAttention(self.reader, self._beginning)
