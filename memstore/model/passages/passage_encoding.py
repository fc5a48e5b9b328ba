"""Passages to keys and values: fetched out of a memory, or each computed alone behind the model's
prefix, many in a forward pass.

What is computed of a passage follows, to rounding, from the model and the passage's tokens alone:
in a pass passages follow one another without padding, and each attends to the prefix and to itself
as if it were alone. The last bits depend on the passages computed with it and on the machine, so
nothing identifies a passage by its keys and values.
"""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from memstore.block import BlockKey
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    InvalidWeights,
    MissingBlock,
    StoreUnavailable,
)
from memstore.model.adapter import Enough
from memstore.model.passages.repositioned_attention import (
    KeysValues,
    PassageModel,
    attention,
    mask_of,
    read_prefix,
)
from memstore.model.passages.selector import Captured, Chosen
from memstore.model.rotary import Positions
from memstore.store.memory_store import MemoryStore
from memstore.store.write.chunk import finite

_TOKENS = 256  # of a pass at most: as fast as more on a CPU
_AT_ONCE = 1 << 27  # keys of passages, in numbers, that a GPU turns at once
_TOKENS_GPU = 1024  # of which a GPU computes longer than Python takes to launch what it computes


class Encoded(NamedTuple):
    """A computed passage.

    k, v: [n, memory layers, Hkv, D] in the KV dtype, k without position; of no layers where the
    pass ended before. captured: what it shows to the selector.
    """

    k: Tensor
    v: Tensor
    captured: Captured

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """K and V as a memory stores them, [n, Shape.passage_width]."""
        return self.k.flatten(1), self.v.flatten(1)


def encode(
    reader: PassageModel,
    passages: Iterable[Sequence[int]],
    *,
    layers: int | None = None,
    layer: int | None = None,
    adapt: bool | None = None,
) -> Iterator[Encoded]:
    """Of each of these passages (ids, none of them empty) what is stored, in their order; layers:
    go through the first ones only (None = all), for the selector's sake. layer: whose states are
    captured; None = the one that the reader's selector needs. adapt: compute with the reading
    adapter; None = as passages are computed.

    The passages of a pass are taken together. Raises InvalidWeights for keys or values that the KV
    dtype cannot hold.
    """
    layer = reader.selector.layer if layer is None else layer
    adapt = reader.adapted_passages if adapt is None else adapt
    most = _TOKENS if reader.device.type == "cpu" else _TOKENS_GPU
    waiting: list[Sequence[int]] = []
    for ids in passages:
        if waiting and sum(map(len, waiting)) + len(ids) > most:
            yield from _encode(reader, waiting, layers, layer, adapt)
            waiting = []
        waiting.append(ids)
    if waiting:
        yield from _encode(reader, waiting, layers, layer, adapt)


@torch.no_grad()
def _encode(
    reader: PassageModel,
    passages: Sequence[Sequence[int]],
    layers: int | None,
    layer: int,
    adapt: bool,
) -> list[Encoded]:
    """The passages of one pass; arguments: see encode."""
    shape, device = reader.shape, reader.device
    last_layer = shape.num_layers if layers is None else layers
    lengths = list(map(len, passages))
    one = _Pass(reader, lengths, shape.memory_layers if layers is None else (), layer)
    given = torch.tensor([[token for ids in passages for token in ids]], device=device)
    try:
        with fast_products(device, reader.dtype):
            last = reader.hidden(given, one.attend, layers=layers, enter=one.enter, adapt=adapt)
        one.enter(last_layer, last)
    except Enough:
        pass
    halves = zip(*(half.split(lengths) for half in one.stored()))
    states = [one.states.split(lengths)] if one.states is not None else []
    shown = [{layer: own} for own in chain(*states)] or [{} for _ in passages]
    return [
        Encoded(k, v, Captured(list(ids), own)) for (k, v), ids, own in zip(halves, passages, shown)
    ]


def check_storable(halves: Sequence[Tensor]) -> None:
    """Are keys and values finite in the dtype in which they are stored? Raises InvalidWeights."""
    if not finite(halves):
        raise InvalidWeights(
            f"its keys or values do not fit into {halves[0].dtype}; they cannot be stored"
        )


class _Pass:
    """The attention of one pass, in which passages follow each other, and what it leaves."""

    def __init__(
        self, reader: PassageModel, lengths: Sequence[int], stored: Sequence[int], layer: int
    ) -> None:
        """lengths: tokens of each passage. stored: layers whose keys and values are kept. layer:
        whose states are captured.
        """
        self._reader, self._layer, shape = reader, layer, reader.shape
        self._prefix = read_prefix(reader, reader.adapted_turns)
        first = self._prefix[0][0].shape[2] if self._prefix else 0
        total, longest = sum(lengths), max(lengths)
        starts = torch.tensor([0, *accumulate(lengths)][:-1])
        within = torch.cat([torch.arange(n) for n in lengths])  # [T], the place in its passage
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        # each passage as a row as long as the longest: the causal mask hides what is behind its end
        rows = (starts[:, None] + torch.arange(longest)).clamp(max=total - 1)
        seen = torch.cat((torch.arange(first).expand(len(lengths), -1), first + rows), 1)
        back = number * longest + within
        self._rows, self._seen, self._back = (x.to(reader.device) for x in (rows, seen, back))
        self._positions = Positions((first + within).to(reader.device), first + longest)
        self._masks: dict[int | None, Tensor] = {}  # by window
        self._numbers = {layer: number for number, layer in enumerate(stored)}
        size = (total, len(stored), shape.num_kv_heads, shape.head_dim)
        self._k, self._v = (
            torch.empty(size, dtype=shape.kv_dtype, device=reader.device) for _ in range(2)
        )
        self.states: Tensor | None = None  # captured, [T, hidden_size]

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """states [1, T, hidden_size]."""
        if layer_idx and layer_idx == self._layer:
            self.states = states[0]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], position-free -> [1, H, T, D]. Raises Enough in
        the last layer.
        """
        reader = self._reader
        if layer_idx in self._numbers:
            number = self._numbers[layer_idx]
            self._k[:, number], self._v[:, number] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        end = reader.shape.num_layers
        if layer_idx == end - 1 and end != self._layer:
            raise Enough
        turned = reader.rotate(layer_idx, torch.cat((q, k), 1), self._positions)
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        if self._prefix:
            k, v = (torch.cat(both, 2) for both in zip(self._prefix[layer_idx], (k, v)))
        q = q[0][:, self._rows].transpose(0, 1)  # [passages, H, longest, D]
        k, v = (half[0][:, self._seen].transpose(0, 1) for half in (k, v))
        spec = reader.forms[layer_idx]
        if spec.window not in self._masks:
            self._masks[spec.window] = mask_of(q, k, spec.window)
        attended = attention(q, k, v, spec, self._masks[spec.window])
        return attended.transpose(0, 1).flatten(1, 2)[None, :, self._back]

    def stored(self) -> KeysValues:
        """K and V [T, stored layers, Hkv, D] in the KV dtype. Raises InvalidWeights."""
        check_storable([self._k, self._v])
        return self._k.cpu(), self._v.cpu()


def fast_products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """While it is entered, on this thread, linear layers of a model on this device compute their
    products so; nothing is kept for it, and no gradients go through.
    """
    one_dnn = torch.backends.mkldnn.is_available()
    return (
        _OneDnn() if one_dnn and (device.type, dtype) == ("cpu", torch.float32) else nullcontext()
    )


class _OneDnn(TorchFunctionMode):
    """Products of float32 by oneDNN, which uses the widest vectors of any CPU; MKL, which torch
    takes for them, of Intel's alone. In half precision torch takes oneDNN by itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and len(args) > 1 and _plain(args[0]) and _plain(args[1]):
            return linear(args[0].to_mkldnn(), *args[1:], **(kwargs or {})).to_dense()
        return func(*args, **(kwargs or {}))


def _plain(x: torch.Tensor) -> bool:
    """Is this a float32 tensor of the CPU, of no class of its own?"""
    known = type(x) in (torch.Tensor, nn.Parameter)
    return (
        known and x.layout is torch.strided and (x.device.type, x.dtype) == ("cpu", torch.float32)
    )


# Fetched out of a memory, or computed where it has none


class _Taken(NamedTuple):
    """A passage: rows [R, Shape.passage_width], which of them its tokens' keys and values are
    (int64 [n] each), and the tier that had them.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    tier: str


class Fetched:
    """Passages that a session reads, in leased slots.

    lengths: tokens of each; tiers: where each was.
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
        """Layers that rotate alike, with keys and values [layers, Hkv, T, D] of the tokens of all
        passages; of none in layers without memory. A GPU fetches all layers at once.
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
        """The same of some layers, which follow one another."""
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
        """As `fetch`. Of passages that cannot be had the tokens have to be here."""
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
        """Compute the missing ones of these passages, and hold them for the next question."""
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
        """What the memory holds of passages; None of those that it does not, and how many of these
        are damaged.
        """
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
                each += [None] if place is None else self._lease([place])
            except CorruptBlock as error:
                each.append(None)
                damaged += not isinstance(error, MissingBlock)
        return each, damaged

    def _lease(self, places: Sequence[tuple[int, int]]) -> list[_Taken]:
        """The same of passages that are there. Raises CorruptBlock."""
        at_once = max(1, self._store.tiers.top.capacity)
        taken: list[_Taken] = []
        for first in range(0, len(places), at_once):
            units = [BlockKey(number, 0, block, 0) for number, block in places[first:][:at_once]]
            lease = self._store.lease(units)
            rows, keys, values = lease.tokens()
            if len(places) <= at_once:
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
        except (CorruptMemory, StoreUnavailable):  # reported if the passage is chosen
            return document, block
        return passage.ids.tobytes()
