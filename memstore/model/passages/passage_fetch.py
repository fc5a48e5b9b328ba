"""Fetching passages: their keys and values out of a memory, or computed where it has none; and
those of what has left a session's dialogue buffer, pinned in main memory until it ends.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from memstore.block import BlockKey
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    MissingBlock,
    StoreUnavailable,
)
from memstore.model.passages.passage_choice import Chosen
from memstore.model.passages.passage_encoding import encode, landmarks_of, padded, words_of
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.repositioned_attention import KeysValues
from memstore.model.session import OwnBlocks, ReadUnit
from memstore.store.memory_store import MemoryStore


class OwnPassages(OwnBlocks):
    """Own text of a session as passages, each computed alone as those of documents are, which the
    model's selector finds beside these.
    """

    def __init__(
        self,
        reader: PassageModel,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        bound: int | None = None,
    ) -> None:
        """documents, bound: as OwnBlocks takes them."""
        per_block = len(reader.shape.memory_layers) * reader.shape.num_kv_heads
        super().__init__(store, documents, per_block, bound=bound)
        self._reader = reader

    def add(self, ids: Sequence[int]) -> None:
        """Add the text of these ids. Where the budget holds less of it, it is forgotten."""
        reader = self._reader
        passages = list(passages_of(reader, [reader.tokenizer.decode(ids)]))
        count = len(passages)
        if not 0 < count <= self.most:
            return
        self.make_room(count)
        found = list(encode(reader, [one.ids.tolist() for one in passages]))
        lengths = [len(one.ids) for one in passages]
        for layer, (k, v) in padded(reader, found).items():
            self.scratch.add(layer, k, v, lengths=lengths)
        self.scratch.add_selected(
            self.blocks.own_end,
            lengths,
            landmarks=landmarks_of(reader, found),
            words=words_of(reader, passages, [""] * count),
        )
        self.blocks.own_end += count


@dataclass
class _Taken:
    """A passage out of the memory."""

    layers: dict[int, KeysValues]
    tiers: dict[int, list[str]]  # by layer, where each of its heads was


@dataclass
class Fetched:
    """Passages that are read: their keys and values in every memory layer, one passage behind the
    other, and the tokens of each; tiers: by memory layer, of each passage and KV head, where it
    was.
    """

    layers: dict[int, KeysValues]
    lengths: list[int]
    tiers: dict[int, list[str]]

    def append_computed(self, tokens: int, kv_heads: int) -> None:
        """Behind them stands a passage of so many tokens, computed with what is read next."""
        self.lengths.append(tokens)
        for tiers in self.tiers.values():
            tiers += ["computed"] * kv_heads

    def units(self, passages: Sequence[Chosen], kv_heads: int, group: int) -> list[ReadUnit]:
        """What is read of these passages, layer by layer, query head by query head, `group` of them
        to a KV head, passage by passage.
        """
        return [
            ReadUnit(layer, head, one.document, one.block, tiers[row * kv_heads + head // group])
            for layer, tiers in self.tiers.items()
            for head in range(kv_heads * group)
            for row, one in enumerate(passages)
        ]


class PassageFetch:
    """Fetches passages for one session."""

    def __init__(self, reader: PassageModel, store: MemoryStore, own: OwnPassages) -> None:
        """own: the session's own passages, which are pinned in the top tier."""
        self._reader, self._store, self._own = reader, store, own
        self._kv_heads = reader.shape.num_kv_heads

    def fetch(self, passages: Sequence[Chosen], *, compute: bool) -> Fetched:
        """What the memory has of passages. What it does not hold, or not whole, is computed as it
        would be read in; without `compute`, only the passages before that are returned. Raises
        BlocksUnavailable, BudgetExceeded, DocumentNotFound, CorruptBlock.
        """
        places = self._store.retrieval.stored_at([(one.document, one.block) for one in passages])
        found, damaged, away = self._there(passages, places)
        missing = [at for at, one in enumerate(found) if one is None]
        if missing:
            self._store.retrieval.computed.count(passages=len(missing), damaged=damaged, away=away)
            if not compute:
                passages = passages[: missing[0]]
            ids = [self.ids(passages[at]) for at in missing if compute]
            every, computed = self._reader.shape.memory_layers, ["computed"] * self._kv_heads
            began = time.perf_counter()
            for at, made in zip(missing, encode(self._reader, ids)):
                chosen, seconds = passages[at], time.perf_counter() - began
                self._store.retrieval.computed.take(
                    chosen.document, chosen.block, made.k, made.v, seconds
                )
                layers = dict(zip(every, zip(made.k, made.v)))
                found[at] = _Taken(layers, dict.fromkeys(every, computed))
                began = time.perf_counter()
        taken = [one for one in found[: len(passages)] if one is not None]
        lengths = [next(iter(one.layers.values()))[0].shape[1] for one in taken]
        device = self._reader.device
        halves = {
            layer: (
                torch.cat([one.layers[layer][0].to(device) for one in taken], 1),
                torch.cat([one.layers[layer][1].to(device) for one in taken], 1),
            )
            for layer in (taken[0].layers if taken else ())
        }
        tiers = {
            layer: [tier for one in taken for tier in one.tiers[layer]]
            for layer in self._reader.shape.memory_layers
        }
        return Fetched(halves, lengths, tiers)

    def _there(
        self, passages: Sequence[Chosen], places: Sequence[tuple[int, int] | None]
    ) -> tuple[list[_Taken | None], int, int]:
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
                    self.ids(one)
            except StoreUnavailable:
                raise error from None
            if not away:
                raise
        found, damaged, more = self._there(passages, left)
        return found, damaged, len(away) + more

    def _leased(self, places: Sequence[tuple[int, int] | None]) -> tuple[list[_Taken | None], int]:
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

    def _lease(self, places: Sequence[tuple[int, int]]) -> list[_Taken]:
        """The same of passages that are there. Raises CorruptBlock."""
        shape, heads = self._reader.shape, self._kv_heads
        layers = shape.memory_layers
        free = self._store.tiers.capacity - self._own.pinned
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
            with self._store.lease(units) as lease:
                lengths = self._store.tiers.lengths[lease.slots[: len(places) * heads : heads]]
                size = (len(some), len(places), heads, shape.block_size, shape.head_dim)
                k, v = (half.view(size) for half in lease.contents())
                tiers = [lease.fetched.get(slot, lease.tier) for slot in lease.slots.tolist()]
            for at, (one, end) in enumerate(zip(taken, lengths.tolist())):
                for row, layer in enumerate(some):
                    unit = (row * len(places) + at) * heads
                    one.layers[layer] = k[row, at, :, :end], v[row, at, :, :end]
                    one.tiers[layer] = tiers[unit : unit + heads]
        return taken

    def ids(self, one: Chosen) -> list[int]:
        """The tokens of a passage."""
        (passage,) = self._store.passages(one.document, one.block, one.block + 1)
        ids: list[int] = passage.ids.tolist()
        return ids

    def content(self, document: int, block: int) -> Hashable:
        """The tokens of a passage, which identify it. A passage of the session's own text, or one
        whose tokens cannot be read, is identified by its place.
        """
        if document == self._own.document:
            return document, block
        try:
            (passage,) = self._store.passages(document, block, block + 1)
        except (CorruptMemory, StoreUnavailable):  # reported if the passage is chosen
            return document, block
        return passage.ids.tobytes()
