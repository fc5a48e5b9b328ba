"""Passages to keys and values: each computed alone behind the reader's prefix, many in a forward
pass.

What is computed of a passage follows from the model and the passage's tokens alone, whatever stands
beside it in a pass: passages of about the same length share a pass of one shape, [rows, width]. A
pass that is not full is filled up, and rows do not see each other.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidWeights
from memstore.model.compact import KeysValues, attention, read_prefix
from memstore.model.reader import ChoosingReader
from memstore.model.tapped import Tapped, Taps
from memstore.store.chunk import finite

_TOKENS = 256  # of a pass: as fast as more on a CPU, and a short document fills few for nothing
_STEP = 4  # widths are multiples of this
_AHEAD = 128  # passages that are looked through for some of one width


class Encoded(NamedTuple):
    """A passage as it is stored.

    layers: of each memory layer K and V [Hkv, n, D] in the KV dtype, K without position; none where
    the pass ended before. tapped: what it shows to the selector.
    """

    layers: dict[int, KeysValues]
    tapped: Tapped


def encode(
    reader: ChoosingReader,
    passages: Iterable[Sequence[int]],
    *,
    layers: int | None = None,
    taps: Taps | None = None,
) -> Iterator[Encoded]:
    """Of each of these passages (ids, none of them empty) what is stored, in their order; layers:
    go through the first ones only (None = all), for the selector's sake. taps: what is shown; None
    = what the reader's selector needs.

    Some of `passages` are taken ahead, and held until those before them are there. Raises
    InvalidWeights for keys or values that the KV dtype cannot hold.
    """
    taps = reader.selector.taps if taps is None else taps
    coming = iter(passages)
    waiting: deque[_Waiting] = deque()
    while True:
        waiting.extend(_Waiting(ids) for ids in islice(coming, _AHEAD - len(waiting)))
        if not waiting:
            return
        if waiting[0].encoded is None:
            width = _width(waiting[0].ids)
            alike = [one for one in waiting if one.encoded is None and _width(one.ids) == width]
            alike = alike[: _rows(width)]
            found = _forward(reader, [one.ids for one in alike], width, layers, taps)
            for one, encoded in zip(alike, found):
                one.encoded = encoded
        done = waiting.popleft().encoded
        assert done is not None
        yield done


@dataclass
class _Waiting:
    ids: Sequence[int]
    encoded: Encoded | None = None


def check_storable(halves: Sequence[Tensor]) -> None:
    """Are keys and values finite in the dtype in which they are stored? Raises InvalidWeights."""
    if not finite(halves):
        raise InvalidWeights(
            f"its keys or values do not fit into {halves[0].dtype}; they cannot be stored"
        )


def _width(ids: Sequence[int]) -> int:
    return -(-len(ids) // _STEP) * _STEP


def _rows(width: int) -> int:
    return max(1, _TOKENS // width)


@dataclass
class _Pass:
    """The attention of one pass, and what it leaves behind."""

    reader: ChoosingReader
    width: int
    kept: dict[int, KeysValues]

    def __post_init__(self) -> None:
        self._prefix = read_prefix(self.reader)
        self._first = self._prefix[0][0].shape[1] if self._prefix else 0
        self._memory = set(self.reader.shape.memory_layers)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T, D], k and v [B, Hkv, T, D], position-free -> [B, H, T, D]."""
        reader, form = self.reader, self.reader.forms[layer_idx]
        if layer_idx in self._memory:
            self.kept[layer_idx] = k, v
        positions = torch.arange(self._first, self._first + self.width, device=q.device)
        turned = reader.rotate(layer_idx, torch.cat((q, k), 1), positions)
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        if self._prefix:
            before = [half.to(k.dtype)[None] for half in self._prefix[layer_idx]]
            before[0] = reader.rotate(
                layer_idx, before[0], torch.arange(self._first, device=k.device)
            )
            k, v = (
                torch.cat((half.expand(len(own), -1, -1, -1), own), 2)
                for half, own in zip(before, (k, v))
            )
        return attention(q, k, v, form, self._mask(form.window, q.device))

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        if window not in self._masks:
            at = torch.arange(self._first + self.width, device=device)
            distance = at[self._first :, None] - at
            seen = distance >= 0
            self._masks[window] = seen if window is None else seen & (distance < window)
        return self._masks[window]


@torch.no_grad()
def _forward(
    reader: ChoosingReader,
    passages: Sequence[Sequence[int]],
    width: int,
    layers: int | None,
    taps: Taps,
) -> Iterator[Encoded]:
    """Some passages of one width, at most `_rows` of them."""
    rows, fill = _rows(width), passages[0][0]
    given = torch.full((rows, width), fill, dtype=torch.int64)
    for row, ids in enumerate(passages):
        given[row, : len(ids)] = torch.as_tensor(ids)
    one = _Pass(reader, width, {})
    states: dict[int, Tensor] = {}
    heads: dict[int, KeysValues] = {}

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer_idx in taps.heads:
            heads[layer_idx] = q, k
        return one.attend(layer_idx, q, k, v)

    def enter(layer_idx: int, entering: Tensor) -> None:
        if layer_idx in taps.states:
            states[layer_idx] = entering

    last = reader.hidden(given.to(reader.device), attend, layers=layers, enter=enter)
    dtype, stored = reader.shape.kv_dtype, dict[int, KeysValues]()
    if layers is None:
        stored = {at: (k.to("cpu", dtype), v.to("cpu", dtype)) for at, (k, v) in one.kept.items()}
        check_storable([half for halves in stored.values() for half in halves])
    else:
        enter(layers, last)
    for row, ids in enumerate(passages):
        n = len(ids)
        yield Encoded(
            {layer: (k[row, :, :n], v[row, :, :n]) for layer, (k, v) in stored.items()},
            Tapped(
                list(ids),
                {layer: entering[row, :n] for layer, entering in states.items()},
                {layer: q[row, :, :n] for layer, (q, _) in heads.items()},
                {layer: k[row, :, :n] for layer, (_, k) in heads.items()},
            ),
        )
