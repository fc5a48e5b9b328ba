"""Passages to keys and values: each computed alone behind the model's prefix, many in a forward
pass.

What is computed of a passage follows, to rounding, from the model and the passage's tokens alone:
every pass has the same number of tokens, in which passages follow one another without padding, and
each attends to the prefix and to itself as if it were alone. The last bits depend on the passages
computed with it and on the machine, so nothing identifies a passage by its keys and values.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from memstore.disk.format.text_parts import Passage
from memstore.errors import InvalidWeights
from memstore.model.adapter import AttentionSpec, Enough
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

_TOKENS = 256  # of a pass: as fast as more on a CPU, and a short document fills few for nothing
_TOKENS_GPU = 1024  # of which a GPU computes longer than Python takes to launch what it computes
AHEAD = 32  # passages of which those are chosen that fill a pass


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

    Some of `passages` are taken ahead, and held until those before them are there. Raises
    InvalidWeights for keys or values that the KV dtype cannot hold.
    """
    captures = reader.selector.captures if captures is None else captures
    adapt = reader.adapted_passages if adapt is None else adapt
    forward = _Forward(reader, layers, captures, adapt)
    coming = iter(passages)
    waiting: deque[_Waiting] = deque()
    while True:
        waiting.extend(_Waiting(ids) for ids in islice(coming, AHEAD - len(waiting)))
        if not waiting:
            return
        if waiting[0].encoded is None:
            missing = [one for one in waiting if one.encoded is None]
            some = [missing[at] for at in fitting([len(one.ids) for one in missing], forward.size)]
            for one, encoded in zip(some, forward.encode([one.ids for one in some])):
                one.encoded = encoded
        done = waiting.popleft().encoded
        assert done is not None
        yield done


@dataclass
class _Waiting:
    ids: Sequence[int]
    encoded: Encoded | None = None


def pass_tokens(reader: PassageModel) -> int:
    """How many tokens a pass has; no passage has more."""
    tokens = _TOKENS if reader.device.type == "cpu" else _TOKENS_GPU
    return max(tokens, reader.shape.block_size)


def fitting(lengths: Sequence[int], size: int) -> tuple[int, ...]:
    """Which of these lengths, the first among them, fill `size` best together, in order; the
    earliest of equals. The first may be longer. Of many, all but the last few are simply the first.
    """
    first, total = 1, lengths[0]
    while first < len(lengths) and total + lengths[first] < size - 2 * _TOKENS:
        total += lengths[first]
        first += 1
    ways: dict[int, tuple[int, ...]] = {total: tuple(range(first))}  # sum -> which
    for at, length in enumerate(lengths[first:], first):
        if size in ways:
            break
        for total, which in list(ways.items()):
            if total + length <= size:
                ways.setdefault(total + length, (*which, at))
    return ways[max(ways)]


def check_storable(halves: Sequence[Tensor]) -> None:
    """Are keys and values finite in the dtype in which they are stored? Raises InvalidWeights."""
    if not finite(halves):
        raise InvalidWeights(
            f"its keys or values do not fit into {halves[0].dtype}; they cannot be stored"
        )


class _Forward:
    """Computes passages, a pass at a time; layers, captures: as in encode."""

    def __init__(
        self, reader: PassageModel, layers: int | None, captures: Captures, adapt: bool
    ) -> None:
        self.size = pass_tokens(reader)
        self._reader, self._layers, self._captures = reader, layers, captures
        self._adapt = adapt
        self._prefix = read_prefix(reader, reader.adapted_turns)

    @torch.no_grad()
    def encode(self, passages: Sequence[Sequence[int]]) -> list[Encoded]:
        """Passages of no more tokens together than a pass has."""
        reader, device = self._reader, self._reader.device
        given = torch.full((1, self.size), passages[0][0], dtype=torch.int64)
        together = torch.cat([torch.as_tensor(ids) for ids in passages])
        given[0, : len(together)] = together
        stored = reader.shape.memory_layers if self._layers is None else ()
        lengths = list(map(len, passages))
        one = _Pass(reader, self._prefix, lengths, self.size, stored, self._captures)
        try:
            with fast_products(device, reader.dtype):
                last = reader.hidden(
                    given.to(device),
                    one.attend,
                    layers=self._layers,
                    enter=one.enter,
                    adapt=self._adapt,
                )
            one.enter(reader.shape.num_layers if self._layers is None else self._layers, last)
        except Enough:
            pass
        k, v = one.stored()
        return [
            Encoded(k[at], v[at], one.captured(ids, at)) for ids, at in zip(passages, one.spans)
        ]


class _Apart:
    """The attention of the passages of a pass, by a call for each: what a CPU does fastest."""

    def __init__(self, reader: PassageModel, first: int, spans: Sequence[slice]) -> None:
        """first: tokens of the prefix. spans: of each passage in the pass."""
        self._first, self._spans, self._device = first, spans, reader.device
        seen = [
            torch.cat((torch.arange(first), torch.arange(first + span.start, first + span.stop)))
            for span in spans
        ]
        # what each passage sees of the prefix and the pass, one after the other
        self._seen = torch.cat(seen).to(reader.device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, P + T, D] of the prefix and the pass, rotated ->
        [1, H, T, D], 0 behind the last passage.
        """
        k, v = (half.index_select(2, self._seen) for half in (k, v))
        attended, end = torch.zeros_like(q.transpose(1, 2)).transpose(1, 2), 0
        for at in self._spans:
            rows = at.stop - at.start
            start, end = end, end + self._first + rows
            own, mask = slice(start, end), self._mask(rows, spec.window)
            attended[:, :, at] = attention(q[:, :, at], k[:, :, own], v[:, :, own], spec, mask)
        return attended

    def _mask(self, rows: int, window: int | None) -> Tensor:
        asked = rows, window
        if asked not in self._masks:
            self._masks[asked] = seen_by(rows, self._first + rows, window, self._device)
        return self._masks[asked]


class _Together:
    """The same by one call, each passage as long as one can be: few launches, for a GPU."""

    def __init__(self, reader: PassageModel, first: int, spans: Sequence[slice]) -> None:
        """As _Apart."""
        self._first, size = first, reader.shape.block_size
        fit = all(span.stop - span.start <= size for span in spans)
        self._longest = size if fit else pass_tokens(reader)  # what is only looked at may be longer
        rows = torch.arange(self._longest)
        starts = torch.tensor([span.start for span in spans])
        ends = torch.tensor([span.stop for span in spans])
        take = (starts[:, None] + rows).clamp(max=int(ends[-1]) - 1)  # behind its end: not seen
        seen = torch.cat((torch.arange(first).expand(len(spans), -1), first + take), 1)
        back = torch.zeros(pass_tokens(reader), dtype=torch.int64)
        for number, span in enumerate(spans):
            back[span] = number * self._longest + rows[: span.stop - span.start]
        self._take, self._seen, self._back = (x.to(reader.device) for x in (take, seen, back))
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """As _Apart; behind the last passage stands what is of no use."""
        if spec.window not in self._masks:
            length = self._first + self._longest
            self._masks[spec.window] = seen_by(self._longest, length, spec.window, q.device)
        q = q[0][:, self._take].transpose(0, 1)
        k, v = (half[0][:, self._seen].transpose(0, 1) for half in (k, v))
        attended = attention(q, k, v, spec, self._masks[spec.window])
        return attended.transpose(0, 1).flatten(1, 2)[None, :, self._back]


class _Pass:
    """The attention of one pass, and what it leaves behind."""

    def __init__(
        self,
        reader: PassageModel,
        prefix: Sequence[KeysValues],
        lengths: Sequence[int],
        size: int,
        stored: Sequence[int],
        captures: Captures,
    ) -> None:
        """prefix: rotated. lengths: tokens of each passage; they may leave some of `size` free.
        stored: layers whose keys and values are kept.
        """
        self._reader, self._prefix, self._captures, shape = reader, prefix, captures, reader.shape
        first = prefix[0][0].shape[2] if prefix else 0
        self.spans = [slice(end - n, end) for n, end in zip(lengths, accumulate(lengths))]
        positions = torch.zeros(size, dtype=torch.int64)
        for n, at in zip(lengths, self.spans):
            positions[at] = torch.arange(first, first + n)
        self._positions = Positions(positions.to(reader.device), first + max(lengths))
        self._attended = (_Apart if reader.device.type == "cpu" else _Together)(
            reader, first, self.spans
        )
        self._numbers = {layer: number for number, layer in enumerate(stored)}
        sizes = (size, len(stored), shape.num_kv_heads, shape.head_dim)
        self._k, self._v = (
            torch.empty(sizes, dtype=shape.kv_dtype, device=reader.device) for _ in range(2)
        )
        self._states: dict[int, Tensor] = {}

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """states [1, T, hidden_size]."""
        if layer_idx in self._captures.states:
            self._states[layer_idx] = states[0]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], position-free -> [1, H, T, D], behind the last
        passage of no use. Raises Enough in the last layer.
        """
        reader, captures = self._reader, self._captures
        if layer_idx in self._numbers:
            number = self._numbers[layer_idx]
            self._k[:, number], self._v[:, number] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        end = reader.shape.num_layers
        if layer_idx == end - 1 and end not in captures.states:
            raise Enough
        turned = reader.rotate(layer_idx, torch.cat((q, k), 1), self._positions)
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        if self._prefix:
            k, v = (torch.cat(both, 2) for both in zip(self._prefix[layer_idx], (k, v)))
        return self._attended(q, k, v, reader.forms[layer_idx])

    def stored(self) -> KeysValues:
        """K and V [T, stored layers, Hkv, D] in the KV dtype. Raises InvalidWeights."""
        end = self.spans[-1].stop
        k, v = self._k[:end], self._v[:end]
        check_storable([k, v])
        return k.cpu(), v.cpu()

    def captured(self, ids: Sequence[int], at: slice) -> Captured:
        """What the passage of these ids shows."""
        states = {layer: states[at] for layer, states in self._states.items()}
        return Captured(list(ids), states)


def padded(reader: PassageModel, encoded: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """K and V of passages as slots of a tier hold them, [n, 1, block_size, Shape.passage_width];
    the rows after a passage's tokens are 0.
    """
    size = (len(encoded), 1, reader.shape.block_size, reader.shape.passage_width)
    k, v = (torch.zeros(size, dtype=reader.shape.kv_dtype) for _ in range(2))
    for number, one in enumerate(encoded):
        k[number, 0, : len(one.k)] = one.k.flatten(1)
        v[number, 0, : len(one.v)] = one.v.flatten(1)
    return k, v


def landmarks_of(reader: PassageModel, encoded: Sequence[Encoded]) -> Tensor | None:
    """The token landmarks that the reader's selector keeps, [tokens of all, heads, width]."""
    found = [reader.selector.landmarks(one.captured) for one in encoded]
    kept = [landmarks for landmarks in found if landmarks is not None]
    return torch.cat(kept) if kept else None


def words_of(
    reader: PassageModel, passages: Sequence[Passage], under: Sequence[str]
) -> list[list[tuple[int, int]]] | None:
    """What the reader's selector keeps of the words of passages, and of what each stands under."""
    texts = (reader.tokenizer.decode(one.ids.tolist()) for one in passages)
    return reader.selector.words([f"{text}\n{above}" for text, above in zip(texts, under)])


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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is linear and len(args) > 1 and _plain(args[0]) and _plain(args[1]):
            return linear(args[0].to_mkldnn(), *args[1:], **(kwargs or {})).to_dense()
        return func(*args, **(kwargs or {}))


def _plain(x: torch.Tensor) -> bool:
    """Is this a float32 tensor of the CPU, of no class of its own?"""
    known = type(x) in (torch.Tensor, nn.Parameter)
    return (
        known and x.layout is torch.strided and (x.device.type, x.dtype) == ("cpu", torch.float32)
    )
