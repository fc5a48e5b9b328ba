"""Passages to keys and values: each computed alone behind the model's prefix, many in a forward
pass.

What is computed of a passage follows, to rounding, from the model and the passage's tokens alone:
in a pass passages follow one another without padding, and each attends to the prefix and to itself
as if it were alone. The last bits depend on the passages computed with it and on the machine, so
nothing identifies a passage by its keys and values.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from memstore.errors import InvalidWeights
from memstore.model.adapter import Enough
from memstore.model.passages.repositioned_attention import (
    KeysValues,
    PassageModel,
    attention,
    read_prefix,
    seen_by,
)
from memstore.model.passages.selector import Captured, Captures
from memstore.model.rotary import Positions
from memstore.store.write.chunk import finite

_TOKENS = 256  # of a pass at most: as fast as more on a CPU
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
    captures: Captures | None = None,
    adapt: bool | None = None,
) -> Iterator[Encoded]:
    """Of each of these passages (ids, none of them empty) what is stored, in their order; layers:
    go through the first ones only (None = all), for the selector's sake. captures: what is shown;
    None = what the reader's selector needs. adapt: compute with the reading adapter; None = as
    passages are computed.

    The passages of a pass are taken together. Raises InvalidWeights for keys or values that the KV
    dtype cannot hold.
    """
    captures = reader.selector.captures if captures is None else captures
    adapt = reader.adapted_passages if adapt is None else adapt
    most = _TOKENS if reader.device.type == "cpu" else _TOKENS_GPU
    waiting: list[Sequence[int]] = []
    for ids in passages:
        if waiting and sum(map(len, waiting)) + len(ids) > most:
            yield from _encode(reader, waiting, layers, captures, adapt)
            waiting = []
        waiting.append(ids)
    if waiting:
        yield from _encode(reader, waiting, layers, captures, adapt)


@torch.no_grad()
def _encode(
    reader: PassageModel,
    passages: Sequence[Sequence[int]],
    layers: int | None,
    captures: Captures,
    adapt: bool,
) -> list[Encoded]:
    """The passages of one pass; arguments: see encode."""
    shape, device = reader.shape, reader.device
    last_layer = shape.num_layers if layers is None else layers
    lengths = list(map(len, passages))
    one = _Pass(reader, lengths, shape.memory_layers if layers is None else (), captures)
    given = torch.tensor([[token for ids in passages for token in ids]], device=device)
    try:
        with fast_products(device, reader.dtype):
            last = reader.hidden(given, one.attend, layers=layers, enter=one.enter, adapt=adapt)
        one.enter(last_layer, last)
    except Enough:
        pass
    halves = zip(*(half.split(lengths) for half in one.stored()))
    shown = zip(*(states.split(lengths) for states in one.states.values()))
    states = [dict(zip(one.states, some)) for some in shown] or [{} for _ in passages]
    return [
        Encoded(k, v, Captured(list(ids), of_layers))
        for (k, v), ids, of_layers in zip(halves, passages, states)
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
        self,
        reader: PassageModel,
        lengths: Sequence[int],
        stored: Sequence[int],
        captures: Captures,
    ) -> None:
        """lengths: tokens of each passage. stored: layers whose keys and values are kept."""
        self._reader, self._captures, shape = reader, captures, reader.shape
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
        self.states: dict[int, Tensor] = {}  # captured, by layer [T, hidden_size]

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """states [1, T, hidden_size]."""
        if layer_idx in self._captures.states:
            self.states[layer_idx] = states[0]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], position-free -> [1, H, T, D]. Raises Enough in
        the last layer.
        """
        reader = self._reader
        if layer_idx in self._numbers:
            number = self._numbers[layer_idx]
            self._k[:, number], self._v[:, number] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        end = reader.shape.num_layers
        if layer_idx == end - 1 and end not in self._captures.states:
            raise Enough
        turned = reader.rotate(layer_idx, torch.cat((q, k), 1), self._positions)
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        if self._prefix:
            k, v = (torch.cat(both, 2) for both in zip(self._prefix[layer_idx], (k, v)))
        q = q[0][:, self._rows].transpose(0, 1)  # [passages, H, longest, D]
        k, v = (half[0][:, self._seen].transpose(0, 1) for half in (k, v))
        spec = reader.forms[layer_idx]
        attended = attention(q, k, v, spec, self._mask(spec.window))
        return attended.transpose(0, 1).flatten(1, 2)[None, :, self._back]

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            rows, length = self._rows.shape[1], self._seen.shape[1]
            self._masks[window] = seen_by(rows, length, window, self._rows.device)
        return self._masks[window]

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
