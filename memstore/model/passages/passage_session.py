"""A session of a passage model: the question is read without memory, a selector chooses passages,
and every memory layer reads them with the question, where a prompt would have them.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    InvalidConfig,
    InvalidInput,
    MissingBlock,
    StoreUnavailable,
)
from memstore.model.generation import Continuation
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.activation_capture import STEP, pieces
from memstore.model.passages.dialogue_buffer import DialogueBuffer
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.repositioned_attention import (
    KeysValues,
    RepositionedAttention,
    computed,
    read_prefix,
)
from memstore.model.passages.selectors.captured_activations import Captured
from memstore.model.passages.selectors.passage_choice import Candidates, Chosen
from memstore.model.passages.session_passages import OwnPassages
from memstore.model.reads import Lookups, OnRead, Read
from memstore.model.session_blocks import Run
from memstore.store.memory_store import MemoryStore
from memstore.store.write.chunk import finite


@dataclass
class _Taken:
    """A passage out of the memory."""

    layers: dict[int, KeysValues]
    tiers: dict[int, list[str]]  # by layer, where each of its heads was


class PassageSession(Closing):
    """Local text behind the reader's prefix, and the passages that it reads now.

    Prefix, passages in the order of the text, the separator, and the local text stand as they would
    in a prompt. The passages' keys and values are the memory's; the separator's are computed over
    them, with the first turn that is read behind them.
    """

    def __init__(
        self,
        reader: PassageModel,
        settings: LookupSettings,
        store: MemoryStore,
        documents: Sequence[tuple[int, int]],
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        """documents: attached ones, as (id, blocks), in the order in which their passages are read.
        retrieve: choose at every question; otherwise only `read` says what is read.

        Raises InvalidConfig if the memory's blocks are on another device.
        """
        if store.tiers.lengths.device.type != reader.device.type:
            raise InvalidConfig(
                f"the model is on {reader.device.type} and the memory's blocks on "
                f"{store.tiers.lengths.device.type}; open the memory with "
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
        told = None if on_read is None else self._told
        self._attention = RepositionedAttention(reader, read_prefix(reader), told)
        self._local = DialogueBuffer(reader, settings.local_tokens)
        self._own = OwnPassages(reader, store, list(documents), self._block_units)
        if settings.own_blocks is not None:
            self._own.most = min(self._own.most, settings.own_blocks)
        self._lengths: list[int] = []  # of the passages read, in tokens
        self._tiers: dict[int, list[str]] = {}  # by layer, of each unit read, where it was
        # tokens behind stored passages that are still to be computed, and what is stored of these
        self._behind: list[int] = []
        self._kept: dict[int, KeysValues] = {}
        self._first: Chosen | None = None  # the passage that these tokens begin with

    # The text

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question as the next turn; the state [hidden_size] that its answer begins with.

        answering: called before the step whose last row predicts the answer's first token. Text
        that the turn pushes out leaves before the choice, which may choose it; so do the first
        tokens of a turn that is longer than what is held.
        """
        ids, words = self.reader.turn_ids(question, first=not self._local.tokens)
        early = max(0, len(ids) - self.settings.local_tokens)
        self.feed(ids[:early])
        ids = ids[early:]
        words = range(max(0, words.start - early), max(0, words.stop - early))
        self._make_room(len(ids))
        if self._retrieve and self._scope:
            self.choose(question, ids, words)
        answering()
        return self.feed(ids)[-1]

    def tell(self, question: str, answer: str) -> int:
        """As AskSession.tell."""
        ids, _ = self.reader.turn_ids(question, first=not self._local.tokens)
        ids = [*ids, *self.reader.tokenizer.encode(answer)]
        self.feed(ids)
        return len(ids)

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> [n, hidden_size], row i being the state that predicts what follows
        ids[i].
        """
        shape, attention = self.reader.shape, self._attention
        none = torch.zeros(0, shape.hidden_size, dtype=self.reader.dtype, device=self.reader.device)
        states = [none]
        self.read_tokens += len(ids)
        for piece in pieces(ids, attention.local, self.settings.local_tokens) if ids else []:
            self._make_room(len(piece))
            before, self._behind, self._kept = self._behind, [], {}
            attention.computed = len(before)
            given = torch.tensor([[*before, *piece]], device=self.reader.device)
            made: list[KeysValues] = []

            def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                if self._first is not None:
                    made.append((k[0], v[0]))  # noqa: B023 (runs now)
                return self.attend(layer_idx, q, k, v)

            began = time.perf_counter()
            try:
                states.append(self.reader.hidden(given, attend)[0, len(before) :])
            finally:
                attention.computed = 0
            self._hold_first(made, time.perf_counter() - began)
            self._local.extend(piece)
        return states[1] if len(states) == 2 else torch.cat(states)

    def _make_room(self, coming: int) -> None:
        """Have the oldest sentences of the local text leave where so many tokens would be too many:
        from then on they are chosen like passages of documents, if anything is.
        """
        held, most = self._attention.local, self.settings.local_tokens
        over = held + coming - most
        if over <= 0 or not held:
            return
        leaving = self._local.sentences(min(held, max(over, STEP)))
        self._attention.let_go(leaving)
        ids = self._local.let_go(leaving)
        if self._retrieve:
            self._own.add(ids)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What ModelAdapter.hidden takes: the local text goes on, and attends to what is read."""
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
        """The tokens that follow `state`, until the turn ends: see memstore.model.generation."""
        return Continuation(
            self,
            state,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            end=self.reader.ends_turn,
        )

    # One token, in a forward pass that other sessions' tokens share: memstore.model.batched_forward

    def begin_token(self) -> bool:
        """Make room for a token, which may always share a forward pass."""
        self._make_room(1)
        return not self._behind

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """A layer begins: nothing is done ahead."""

    def end_token(self, token: int) -> None:
        """The forward pass is done."""
        self._local.extend([token])
        self.read_tokens += 1

    # What is read

    def choose(self, question: str, ids: Sequence[int], words: range) -> list[Chosen]:
        """Choose passages for a turn that is about to be read, and read them from now on.

        question: as typed; ids: of the turn, `words` those of the question itself. The local turns
        before it are read with it, memory never is. Nothing is read where nothing answers.
        """
        captured = self._local.look_ahead(ids, words)
        found = self._choose(captured, question)
        self.answered = found is not None
        self.read(found or [])
        return self.chosen

    def _choose(self, captured: Captured, question: str) -> list[Chosen] | None:
        """The passages that are meant; None where nothing answers."""
        selector, scope, gate = self.reader.selector, self._scope, self.reader.gate
        scores = selector.scores(captured, question, self.store, scope)
        best = Candidates(
            scores, selector, captured, self.store, scope, self.settings.top_k, self._content
        )
        self.candidates = best
        alone = gate is None or gate.answers(scores)
        answers = alone or (gate is not None and gate.answer_together(scores, best.together))
        self.lookups.done += answers
        self.lookups.skipped += not answers
        return best.meant(self.settings, parts=not alone) if answers else None

    def _content(self, document: int, block: int) -> Hashable:
        if document == self._own.document:
            return document, block
        (passage,) = self.store.passages(document, block, block + 1)
        return passage.ids.tobytes()

    def read(self, passages: Sequence[Chosen]) -> None:
        """Read these passages, in this order, from now on; none for reading nothing.

        Raises InvalidInput for more passages than top_k, BudgetExceeded, DocumentNotFound,
        CorruptBlock.
        """
        if len(passages) > self.settings.top_k:
            raise InvalidInput(
                f"{len(passages)} passages; top_k allows {self.settings.top_k} at most"
            )
        try:
            self._read(passages)
        except BlocksUnavailable as error:
            gone = {(number, block) for number, _, block, _ in error.units}
            places = self.store.stored_at([(one.document, one.block) for one in passages])
            left = [one for one, place in zip(passages, places) if place not in gone]
            if not self.store.allow_partial or len(left) == len(passages):
                raise
            self.absent |= {one.document for one in passages if one not in left}
            self.read(left)

    def _read(self, passages: Sequence[Chosen]) -> None:
        chained = self.settings.chained and all(one.document > 0 for one in passages)
        # of what is stored behind the answer every number is as if it had been read in
        compute = not chained or self.store.kv_budget is not None
        self._tiers = {layer: [] for layer in self.reader.shape.memory_layers}
        self._lengths = []
        stored, kept = self._taken(passages[:1] if chained else passages, compute=compute)
        behind: list[int] = []
        self._first = passages[0] if passages and not stored else None
        for at, one in enumerate(passages[len(stored) :], len(stored)):
            ids = self._ids(one, behind=passages[at - 1] if at else None)
            behind += ids
            self._lengths.append(len(ids))
            for tiers in self._tiers.values():
                tiers += ["computed"] * self._kv_heads
        if passages:
            behind += self.reader.separator_ids
        for layer in range(self.reader.shape.num_layers):
            self._attention.remember(layer, *kept.get(layer, self._nothing))
        self.chosen, self._behind, self._kept = list(passages), behind, kept
        if self._attention.local:
            self.settle()

    def settle(self) -> None:
        """Compute what stands behind the stored passages now, and not with the text that is read
        next.
        """
        behind, self._behind = self._behind, []
        if not behind:
            return
        context = RepositionedAttention(self.reader, self._attention.prefix)
        for layer, halves in self._kept.items():
            context.remember(layer, *halves)
        began = time.perf_counter()
        made = computed(context, behind)
        self._hold_first(made, time.perf_counter() - began)
        for layer, more in enumerate(made):
            halves = self._kept.get(layer, self._nothing)
            self._attention.remember(
                layer, *(torch.cat((half.to(new), new), 1) for half, new in zip(halves, more))
            )
        self._kept = {}

    def _taken(
        self, passages: Sequence[Chosen], *, compute: bool
    ) -> tuple[Sequence[Chosen], dict[int, KeysValues]]:
        """Passages, and their keys and values in every memory layer, one passage behind the other:
        the memory's. What it does not hold, or not whole, is computed as it would be read in;
        without `compute`, the passages before that are returned.
        """
        places = self.store.stored_at([(one.document, one.block) for one in passages])
        found, damaged, away = self._there(passages, places)
        missing = [at for at, one in enumerate(found) if one is None]
        self.store.note_used([place for place, one in zip(places, found) if place and one])
        if missing:
            self.store.note_computed(len(missing), damaged=damaged, away=away)
            if not compute:
                passages = passages[: missing[0]]
            ids = [self._ids(passages[at]) for at in missing if compute]
            layers, tiers = self.reader.shape.memory_layers, ["computed"] * self._kv_heads
            began = time.perf_counter()
            for at, made in zip(missing, encode(self.reader, ids)):
                chosen, seconds = passages[at], time.perf_counter() - began
                k, v = self.store.take_computed(
                    chosen.document, chosen.block, made.k, made.v, seconds
                )
                found[at] = _Taken(dict(zip(layers, zip(k, v))), dict.fromkeys(layers, tiers))
                began = time.perf_counter()
        taken = [one for one in found[: len(passages)] if one is not None]
        for one in taken:
            self._lengths.append(next(iter(one.layers.values()))[0].shape[1])
            for layer in self._tiers:
                self._tiers[layer] += one.tiers[layer]
        device = self.reader.device
        return passages, {
            layer: (
                torch.cat([one.layers[layer][0].to(device) for one in taken], 1),
                torch.cat([one.layers[layer][1].to(device) for one in taken], 1),
            )
            for layer in (taken[0].layers if taken else ())
        }

    def _there(
        self, passages: Sequence[Chosen], places: Sequence[tuple[int, int] | None]
    ) -> tuple[list["_Taken | None"], int, int]:
        """As _leased; and how many passages could not be had, of which the tokens are here. Raises
        BlocksUnavailable where those are not, either.
        """
        try:
            return *self._leased(places), 0
        except BlocksUnavailable as error:
            gone = {(number, block) for number, _, block, _ in error.units}
            left = [None if place in gone else place for place in places]
            away = [one for one, place in zip(passages, places) if place in gone]
            try:
                for one in away:
                    self._ids(one)
            except StoreUnavailable:
                raise error from None
            if not away:
                raise
        found, damaged, more = self._there(passages, left)
        return found, damaged, len(away) + more

    def _hold_first(self, layers: Sequence[KeysValues], seconds: float) -> None:
        """Have the store hold the passage that was computed first, with what follows it: that is no
        other than if it had been alone. layers: k and v of all tokens of that pass, which took so
        many seconds, in every layer.
        """
        first, self._first = self._first, None
        if first is None or not layers:
            return
        n, shape = self._lengths[0], self.reader.shape
        k, v = (
            torch.stack([layers[layer][half][:, :n] for layer in shape.memory_layers])
            .to(shape.kv_dtype)
            .cpu()
            for half in (0, 1)
        )
        if finite((k, v)):
            share = seconds * n / layers[0][0].shape[1]
            self.store.take_computed(first.document, first.block, k, v, share)

    def _leased(
        self, places: Sequence[tuple[int, int] | None]
    ) -> tuple[list["_Taken | None"], int]:
        """What the memory holds of passages; None of those that it does not, and how many of these
        are damaged.
        """
        there = [place for place in places if place is not None]
        try:
            found = iter(self._lease(there))
            return [None if place is None else next(found) for place in places], 0
        except CorruptBlock:
            if any(place[0] < 0 for place in there):
                raise
        each: list[_Taken | None] = []
        damaged = 0
        for place in places:
            try:
                each += [None] if place is None else self._lease([place])
            except CorruptBlock as error:
                each.append(None)
                damaged += not isinstance(error, MissingBlock)
        return each, damaged

    def _lease(self, places: Sequence[tuple[int, int]]) -> "list[_Taken]":
        """The same of passages that are there. Raises CorruptBlock."""
        shape, heads = self.reader.shape, self._kv_heads
        layers = shape.memory_layers
        free = self.store.capacity - self._own.blocks.own * self._block_units  # own ones are pinned
        at_once = max(1, free // max(1, len(places) * heads))
        taken = [_Taken({}, {}) for _ in places]
        for first in range(0, len(layers) if places else 0, at_once):
            some = layers[first : first + at_once]
            units = [
                BlockKey(number, layer, block, head)
                for layer in some
                for number, block in places
                for head in range(heads)
            ]
            with self.store.lease(units) as lease:
                lengths = self.store.tiers.lengths[lease.slots[: len(places) * heads : heads]]
                size = (len(some), len(places), heads, shape.block_size, shape.head_dim)
                k, v = (half.index_select(0, lease.slots).view(size) for half in (lease.k, lease.v))
                tiers = [lease.fetched.get(slot, lease.tier) for slot in lease.slots.tolist()]
            for at, (one, end) in enumerate(zip(taken, lengths.tolist())):
                for row, layer in enumerate(some):
                    unit = (row * len(places) + at) * heads
                    one.layers[layer] = k[row, at, :, :end], v[row, at, :, :end]
                    one.tiers[layer] = tiers[unit : unit + heads]
        return taken

    def _ids(self, one: Chosen, *, behind: Chosen | None = None) -> list[int]:
        """The tokens of a passage; behind the one before it in the text, without the context in
        front, which would be there twice.
        """
        (passage,) = self.store.passages(one.document, one.block, one.block + 1)
        follows = behind is not None and (behind.document, behind.block + 1) == (
            one.document,
            one.block,
        )
        ids: list[int] = passage.ids[passage.lead if follows else 0 :].tolist()
        return ids

    @property
    def _nothing(self) -> KeysValues:
        shape, device = self.reader.shape, self.reader.device
        none = torch.zeros(shape.num_kv_heads, 0, shape.head_dim, device=device)
        return none, none

    @property
    def _kv_heads(self) -> int:
        return self.reader.shape.num_kv_heads

    @property
    def _block_units(self) -> int:
        return len(self.reader.shape.memory_layers) * self._kv_heads

    @property
    def _scope(self) -> tuple[Run, ...]:
        """What is chosen from: attached documents, then what left the local text."""
        return self._own.blocks.runs(self._own.blocks.count)

    def _told(self, layer_idx: int, weights: Tensor) -> None:
        """Tell what the last row of a step read in a layer: weights [H, m]."""
        if self._on_read is None or layer_idx not in self._tiers:
            return
        weights = weights[:, : sum(self._lengths)]  # the separator stands behind them
        parts = [part.sum(-1) for part in weights.split(self._lengths, 1)]
        of_passages = torch.stack(parts, 1).tolist()
        tiers, group = self._tiers[layer_idx], self.reader.shape.group
        self._on_read(
            [
                Read(
                    layer_idx,
                    head,
                    one.document,
                    one.block,
                    part,
                    tiers[row * self._kv_heads + head // group],
                )
                for head, of_head in enumerate(of_passages)
                for row, (one, part) in enumerate(zip(self.chosen, of_head))
            ]
        )

    @property
    def same(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """As AskSession.same."""
        return {(one.document, one.block): one.same for one in self.chosen if one.same}

    @property
    def held(self) -> dict[str, int]:
        """How much is held of the session's own text: "local_tokens", and "own_blocks" beside."""
        return {"local_tokens": self._attention.local, "own_blocks": self._own.blocks.own}

    def close(self) -> None:
        """Let go of what is read and of the session's own passages; the documents stay."""
        self.chosen, self.candidates, self._kept = [], None, {}
        self._own.close()
        self._attention = RepositionedAttention(self.reader, self._attention.prefix)
