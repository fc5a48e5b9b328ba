"""Fetch the keys and values of the passages that a session reads, or compute those that the memory
does not hold.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    DocumentNotFound,
    MissingBlock,
    StoreUnavailable,
)
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.repositioned_attention import KeysValues, PassageModel
from memstore.model.passages.selector import Chosen
from memstore.store.memory_store import MemoryStore

_AT_ONCE = 1 << 27  # keys of passages, in numbers, that a GPU turns at once


class _Taken(NamedTuple):
    """A passage: a tensor [R, Shape.passage_width], the rows of it with the keys and the values of
    the passage's tokens (int64 [n] each), and the tier that had them.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    tier: str


class Fetched:
    """Passages that a session reads, in leased slots.

    lengths: tokens of each; tiers: the tier that had each.
    """

    def __init__(self, reader: PassageModel, taken: Sequence[_Taken]) -> None:
        self.lengths = [len(one.keys) for one in taken]
        self.tiers = [one.tier for one in taken]
        self._shape, self._device, self._kinds = reader.shape, reader.device, reader.rotary_kinds
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []  # of those in the same rows, at once
        for _, run in groupby(taken, key=lambda one: one.rows.data_ptr()):
            some = list(run)
            keys, values = (torch.cat(both) for both in zip(*((x.keys, x.values) for x in some)))
            self._parts.append((some[0].rows, keys, values))

    def of_layers(self) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """Groups of layers that rotate alike, with keys and values [layers, Hkv, T, D] of the
        tokens of all passages; T = 0 in layers without memory. A GPU gets all layers at once.
        """
        shape = self._shape
        of_layer = max(1, sum(self.lengths)) * shape.num_kv_heads * shape.head_dim
        most = 1 if self._device.type == "cpu" else max(1, _AT_ONCE // of_layer)

        def alike(layer: int) -> object:
            return layer in shape.memory_layers, self._kinds[layer], layer // most

        for _, run in groupby(range(shape.num_layers), key=alike):
            layers = list(run)
            yield layers, *self._fetched(layers)

    def _fetched(self, layers: Sequence[int]) -> KeysValues:
        """Keys and values of some consecutive layers."""
        shape, memory = self._shape, self._shape.memory_layers
        heads, dim = shape.num_kv_heads, shape.head_dim
        halves: tuple[list[Tensor], list[Tensor]] = [], []
        for rows, *both in self._parts if layers[0] in memory else ():
            of_layers = rows.unflatten(1, (-1, heads, dim))
            of_layers = of_layers.narrow(1, memory.index(layers[0]), len(layers))
            for half, at in zip(halves, both):
                some = of_layers.index_select(0, at).to(self._device)
                half.append(some.permute(1, 2, 0, 3))
        none = torch.zeros(len(layers), heads, 0, dim, dtype=shape.kv_dtype, device=self._device)
        k, v = (half[0] if len(half) == 1 else torch.cat([none, *half], 2) for half in halves)
        return k, v


class PassageFetch:
    """Fetches passages for one session."""

    def __init__(self, reader: PassageModel, store: MemoryStore) -> None:
        self._reader, self._store = reader, store
        self._leases = ExitStack()  # of the passages that are being fetched

    @contextmanager
    def fetch(self, passages: Sequence[Chosen], *, compute: bool) -> Iterator[Fetched]:
        """Context with keys and values of passages, leased until it ends. A passage that the memory
        does not hold, or only damaged, is computed as it would be stored; without `compute`, only
        the passages before it are returned. Raises BlocksUnavailable, BudgetExceeded,
        DocumentNotFound, CorruptBlock.
        """
        with ExitStack() as self._leases:
            found = self._take(passages, compute)
            yield Fetched(self._reader, [one for one in found if one is not None])

    def _take(self, passages: Sequence[Chosen], compute: bool) -> list[_Taken | None]:
        """As `fetch`. If keys and values are unavailable, the tokens must be available."""
        places = self._store.retrieval.stored_at([(one.document, one.block) for one in passages])
        away = 0
        while True:
            try:
                found, damaged = self._leased(places)
                break
            except BlocksUnavailable as error:
                gone = {(number, block) for number, _, block, _ in error.units}
                lost = [one for one, place in zip(passages, places) if place in gone]
                try:
                    for one in lost:
                        self.ids(one)
                except StoreUnavailable:
                    raise error from None
                if not lost:
                    raise
                places = [None if place in gone else place for place in places]
                away += len(lost)
        missing = [at for at, one in enumerate(found) if one is None]
        if missing:
            self._store.retrieval.count_computed(len(missing), damaged=damaged, away=away)
            if compute:
                self._compute(passages, missing, found)
            else:
                del found[missing[0] :]
        return found

    def _compute(
        self, passages: Sequence[Chosen], missing: Sequence[int], found: list[_Taken | None]
    ) -> None:
        """Compute the missing passages, and cache them for the next question."""
        began = time.perf_counter()
        ids = [self.ids(passages[at]) for at in missing]
        for at, made in zip(missing, encode(self._reader, ids)):
            chosen, seconds = passages[at], time.perf_counter() - began
            k, v = made.stored
            self._store.retrieval.take_computed(chosen.document, chosen.block, k, v, seconds)
            keys = torch.arange(len(made.k))
            found[at] = _Taken(torch.cat((k, v)), keys, keys + len(keys), "computed")
            began = time.perf_counter()

    def _leased(self, places: Sequence[tuple[int, int] | None]) -> tuple[list[_Taken | None], int]:
        """Lease passages; None for those that the memory lacks, and the number of damaged ones."""
        there = [place for place in places if place is not None]
        try:
            found = iter(self._lease(there))
            return [None if place is None else next(found) for place in places], 0
        except CorruptBlock:
            pass
        each: list[_Taken | None] = []
        damaged = 0
        for place in places:
            try:
                each += [None] if place is None else self._lease([place], copied=True)
            except CorruptBlock as error:
                each.append(None)
                damaged += not isinstance(error, MissingBlock)
        return each, damaged

    def _lease(self, places: Sequence[tuple[int, int]], *, copied: bool = False) -> list[_Taken]:
        """Lease passages that the memory holds. copied: hold no slots. Raises CorruptBlock."""
        at_once = max(1, self._store.tiers.top.capacity)
        taken: list[_Taken] = []
        for first in range(0, len(places), at_once):
            units = [BlockKey(number, 0, block, 0) for number, block in places[first:][:at_once]]
            lease = self._store.lease(units)
            rows, keys, values = lease.tokens()
            if len(places) <= at_once and not copied:
                self._leases.enter_context(lease)
            else:  # the next ones need their slots
                with lease:
                    rows = rows.index_select(0, torch.cat((keys, values)))
                keys, values = torch.arange(len(rows), device=rows.device).chunk(2)
            lengths = lease.lengths.tolist()
            for some in zip(keys.split(lengths), values.split(lengths), lease.tiers):
                taken.append(_Taken(rows, *some))
        return taken

    def ids(self, one: Chosen) -> list[int]:
        """The tokens of a passage."""
        (passage,) = self._store.passages(one.document, one.block, one.block + 1)
        ids: list[int] = passage.ids.tolist()
        return ids

    def content(self, document: int, block: int) -> Hashable:
        """The tokens of a passage as bytes: a key that equal passages share.

        If the tokens cannot be read, the key is (document, block).
        """
        try:
            (passage,) = self._store.passages(document, block, block + 1)
        except (DocumentNotFound, CorruptMemory, StoreUnavailable):  # reported if it is chosen
            return document, block
        return passage.ids.tobytes()
