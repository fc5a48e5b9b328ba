"""Compute the keys and values of passages: each alone after the model's prefix, many in a forward
pass; and ingest by a passage model, which commits them.

Keys and values of a passage follow, up to rounding, from the model and the passage's tokens alone:
a pass packs passages without padding, and each attends to the prefix and itself only. The last bits
depend on the other passages of the pass and on the machine, so keys and values never identify a
passage.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain, islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from memstore.disk.format.document import Place, Places
from memstore.disk.tables.texts import Keep, Passage
from memstore.errors import InvalidWeights
from memstore.index.word_index import around
from memstore.model.adapter import Enough
from memstore.model.cutting import Passages
from memstore.model.passages.repositioned_attention import (
    KeysValues,
    PassageModel,
    attention,
    mask_of,
)
from memstore.model.passages.selector import Captured
from memstore.model.rotary import Positions
from memstore.model.source_text import Text
from memstore.store.chunks import finite
from memstore.store.writer import DocumentWriter, Known

# The most tokens of a forward pass: enough that a GPU computes longer than Python takes to launch
# its kernels, and that the threads of a CPU compute longer than they wait for one another
_TOKENS = 1024


class Encoded(NamedTuple):
    """A computed passage.

    k, v: [n, memory layers, Hkv, D] in the KV dtype, k without positions; no layers if the pass
    ended early. captured: for the selector.
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
    """Compute passages (non-empty ids); yield them in order. layers: run only the first ones (None:
    all), for the selector. layer: whose states are captured (None: the one that the selector
    needs). adapt: compute with the reading adapter (None: as the model's passages are computed).

    Passages of one pass are taken together from the iterable. Raises InvalidWeights for keys or
    values that the KV dtype cannot hold.
    """
    layer = reader.selector.layer if layer is None else layer
    adapt = reader.adapted_passages if adapt is None else adapt
    waiting: list[Sequence[int]] = []
    for ids in passages:
        if waiting and sum(map(len, waiting)) + len(ids) > _TOKENS:
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
    """Raises InvalidWeights unless keys and values are finite in the dtype of storage."""
    if not finite(halves):
        raise InvalidWeights(
            f"the model's keys or values are out of range of {halves[0].dtype}; use another model"
        )


class _Pass:
    """The attention of one pass over consecutive passages, and what the pass computes of them."""

    def __init__(
        self, reader: PassageModel, lengths: Sequence[int], stored: Sequence[int], layer: int
    ) -> None:
        """lengths: tokens of each passage. stored: layers whose keys and values are stored. layer:
        whose states are captured.
        """
        self._reader, self._layer, shape = reader, layer, reader.shape
        self._prefix = reader.prefix(reader.adapted_turns)
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
    """Context in which this thread's linear layers on a CPU in float32 use the faster library;
    without gradients. On CPUs whose widest vectors are AVX2, torch's default is.
    """
    backends = torch.backends
    one_dnn = backends.mkldnn.is_available() and backends.cpu.get_cpu_capability() != "AVX2"
    return (
        _OneDnn() if one_dnn and (device.type, dtype) == ("cpu", torch.float32) else nullcontext()
    )


class _OneDnn(TorchFunctionMode):
    """Computes float32 products by oneDNN, which uses the widest vectors of any CPU; torch's
    default, MKL, uses AVX-512 on Intel's only. Half precision uses oneDNN by default.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and len(args) > 1 and _plain(args[0]) and _plain(args[1]):
            return linear(args[0].to_mkldnn(), *args[1:], **(kwargs or {})).to_dense()
        return func(*args, **(kwargs or {}))


def _plain(x: torch.Tensor) -> bool:
    """Whether this is a float32 tensor on the CPU and of no subclass."""
    known = type(x) in (torch.Tensor, nn.Parameter)
    return (
        known and x.layout is torch.strided and (x.device.type, x.dtype) == ("cpu", torch.float32)
    )


# Ingest

_AT_ONCE = 16  # passages that are stored together
_LOOKED_UP = 64  # passages that are looked up together
_TITLE = 100  # characters; a longer first line is no title


def read_passages(
    reader: PassageModel, text: Text, keep: Keep, writer: DocumentWriter
) -> Iterator[tuple[int, int]]:
    """Ingest a text passage by passage, from its writer's position on; yield the characters before
    and after each batch. keep: "kv" stores keys and values, "text" only text, from which a question
    computes the keys and values that it needs.
    """
    first = writer.characters
    passages = passages_of(reader, [text.content], text.places)
    coming, ahead = tee(_looked_up(writer, (one for one in passages if one.end > first)))
    missing = (one.ids.tolist() for one, known in ahead if _missing(known, keep))
    layers = reader.selector.layer if keep == "text" else None
    computed = encode(reader, missing, layers=layers)
    # passages are found by what they stand under, too: the document's name, its first line if that
    # is short, and their headings; and by what stands around them
    line, _, _ = text.content.lstrip()[: _TITLE + 1].partition("\n")
    title = f"{text.name}\n{line}" if len(line) <= _TITLE else text.name
    places = Places(text.places)
    while pairs := list(islice(coming, _AT_ONCE)):
        some = [one for one, _ in pairs]
        new = [at for at, (_, known) in enumerate(pairs) if _missing(known, keep)]
        found = list(islice(computed, len(new)))
        texts = [reader.tokenizer.decode(one.ids.tolist()) for one in some]
        named = ["\n".join((t, title, *places.headings(p.start))) for t, p in zip(texts, some)]
        near = [around(text.content, one.start, one.end) for one in some]
        writer.add_passages(
            some,
            [one.stored for one in found] if keep == "kv" else [],
            given=new if keep == "kv" else [],
            landmarks=_landmarks(reader, pairs, new, found),
            words=reader.selector.words(zip(named, near)),
        )
        yield some[0].start, some[-1].end


def _looked_up(
    writer: DocumentWriter, passages: Iterable[Passage]
) -> Iterator[tuple[Passage, Known | None]]:
    """Passages, each with what the memory already stores of it."""
    coming = iter(passages)
    while some := list(islice(coming, _LOOKED_UP)):
        yield from zip(some, writer.known(some))


def _missing(known: Known | None, keep: Keep) -> bool:
    """Whether a passage must be computed."""
    return known is None or (keep == "kv" and not known.stored)


def _landmarks(
    reader: PassageModel,
    pairs: Sequence[tuple[Passage, Known | None]],
    new: Sequence[int],
    computed: Sequence[Encoded],
) -> Tensor | None:
    """Token landmarks of passages, computed for the `new` ones and stored for the others; None if
    the model's selector stores none.
    """
    parts: list[Tensor | None] = [
        None if known is None or known.landmarks is None else torch.from_numpy(known.landmarks)
        for _, known in pairs
    ]
    for at, one in zip(new, computed):
        parts[at] = reader.selector.landmarks(one.captured)
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if kept else None


def passages_of(
    reader: PassageModel, parts: Iterable[str], places: Sequence[Place] = ()
) -> Passages:
    """The passages of a model for a text, given in parts: see Passages."""
    size, most = reader.passage_tokens, reader.shape.block_size
    return Passages(reader.tokenizer, "".join(parts), places, size=size, most=most)
