"""A passage model, and its attention over the prefix, the passages read from a memory and the local
text, at the positions of a prompt and under one softmax; and the states that its selector captures
from a text that is read without memory.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from memstore.model.adapter import AttentionSpec, ModelAdapter
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.adaptation import Refusal
from memstore.model.passages.selector import Captured, Gate, Selector
from memstore.model.rotary import Positions
from memstore.model.session import OnRead, ReadUnit, StepReads

KeysValues = tuple[Tensor, Tensor]
"""k and v [Hkv, n, D], position-free."""


class PassageModel(ModelAdapter):
    """A model whose blocks are passages: a selector chooses them once for a question, and every
    memory layer attends to them at the positions of a prompt. `attend` gets keys without positions,
    as they are stored. shape.block_size: maximum number of tokens in a passage.
    """

    selector: Selector
    gate: Gate | None  # decides whether any passage answers; None: always
    adapted_passages = False  # are passages computed with a reading adapter,
    adapted_turns = False  # and questions and answers, in a session that reads passages?
    refusal: Refusal | None = None  # how such a session refuses
    usual: LookupSettings  # of the adaptation, whatever `lookup` was set to; for Evidence.near
    prefix_ids: list[int]  # begin every text and question (attention sinks)
    separator_ids: list[int]  # between passages and the local text
    forms: Sequence[AttentionSpec]
    rotary_kinds: Sequence[Hashable]  # of each layer; equal if `rotate` treats them alike
    passage_tokens: int  # up to which passages are filled

    @abstractmethod
    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        """Rotate queries or keys [B, H, T, D] of a layer to positions [T]; fastest for a range of
        consecutive positions.
        """

    @abstractmethod
    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        """Ids of a question as the next turn of a conversation, after the prefix if it is the first
        turn; and the range of these ids that are the question's own words.
        """

    @abstractmethod
    def ends_turn(self, token: int) -> bool:
        """Whether this token ends an answer."""

    @abstractmethod
    def prefix(self, adapt: bool = False) -> Sequence[KeysValues]:
        """Keys and values [1, Hkv, P, D] of the prefix in every layer, keys at their positions;
        empty without a prefix. Do not change them. adapt: compute with the reading adapter.
        """


Observe = Callable[[int, Tensor], None]
"""Called with (layer_idx, attention mass of the last row on each remembered part [H, parts])."""

_GROW = 256  # tokens of room at a time
_SPARE = 384  # tokens of room at first, for a question and for the room of a recorded step
WHOLE = 64  # tokens that the room is a multiple of, as fused attention wants it
_WIDER = 8  # columns at a time: fused attention on a GPU takes multiples of it


@dataclass
class LayerContext:
    """Keys and values [1, Hkv, capacity, D] of one layer, keys rotated; `length` tokens are filled.

    If attention is observed, both have extra columns: zeros in keys; in values a 1 in the column of
    the remembered part that the token belongs to. The attention output in these columns is the
    attention mass of a row on each part.
    """

    k: Tensor
    v: Tensor
    plain: Tensor  # keys of the local text without position, [1, Hkv, capacity, D]
    remembered: int  # tokens between the prefix and the local text
    length: int


@dataclass
class RepositionedAttention:
    """What one text attends to: the model's prefix at positions 0 .. P - 1, m remembered tokens
    from P on, and its own tokens from P + m on. A gap between these would lose answers.

    `attend` is an argument of ModelAdapter.hidden, for one row and one thread.
    """

    reader: PassageModel
    # of every layer [1, Hkv, P, D], keys at their positions; no pairs where there is none; None for
    # the reader's own, which `begin` computes
    prefix: Sequence[KeysValues] | None = None
    observe: Observe | None = None  # told of the last row of every step
    # tokens of each part of what is remembered from the next `remember` on, that is observed
    parts: Sequence[int] = ()
    # [remembered tokens]: what is added to the logits of attention to them; None adds nothing
    bias: Tensor | None = None
    # of the next step so many tokens, its first, are remembered ones that no memory holds; there
    # must be no local text yet
    computed: int = 0
    layers: dict[int, LayerContext] = field(default_factory=dict)
    adapt: bool = False  # is the text read with the reader's adapter?
    _masks: dict[object, Tensor] = field(default_factory=dict, init=False)  # of the last steps

    def begin(self, layers: int | None = None) -> None:
        """Add the prefix, and room after it, to the first `layers` layers (None: all). Call it
        before a forward pass: computing the prefix is a forward pass, too.
        """
        count = self.reader.shape.num_layers if layers is None else layers
        if missing := [layer for layer in range(count) if layer not in self.layers]:
            self._make_room(missing, 0)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], position-free -> [1, H, T, D]."""
        if layer_idx not in self.layers:
            self._make_room([layer_idx], 0)
        layer = self.layers[layer_idx]
        rows, start, dim = q.shape[2], layer.length, q.shape[3]
        positions = range(start, start + rows)
        own = k[:, :, self.computed :]
        layer.plain = _put(layer.plain, start - layer.remembered - self.first, own)
        turned = self.reader.rotate(layer_idx, torch.cat((q, k), 1), positions)
        wider = layer.k.shape[3] - dim
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        q = pad(q, (0, wider)) if wider else q
        layer.k = _put(layer.k, start, k)
        layer.v = _put(layer.v, start, v)
        layer.length += rows
        if self.computed:
            layer.remembered += self.computed
            self._mark(layer.v, start, self.computed)
        keys, values = layer.k[:, :, : layer.length], layer.v[:, :, : layer.length]
        spec, mask = self.reader.forms[layer_idx], None
        if rows > 1 or self.bias is not None:
            mask = self._mask(q, keys, spec.window)
        elif spec.window is not None:  # it sees the last ones, and all of these
            keys, values = keys[:, :, -spec.window :], values[:, :, -spec.window :]
        output = attention(q, keys, values, spec, mask)
        if not wider:
            return output
        if self.observe is not None:
            self.observe(layer_idx, output[0, :, -1, dim : dim + len(self.parts)])
        return output[..., :dim]

    def _mark(self, values: Tensor, start: int, tokens: int) -> None:
        """Write into the extra columns of values [.., capacity, D + wider] which part each of
        `tokens` remembered tokens from `start` on belongs to.
        """
        dim, at = self.reader.shape.head_dim, start - self.first
        if values.shape[-1] > dim and at < sum(self.parts):
            parts = torch.eye(len(self.parts), values.shape[-1] - dim).repeat_interleave(
                torch.tensor(self.parts), 0
            )[at : at + tokens]
            values[..., start : start + len(parts), dim:] = parts

    def divide(self, parts: Sequence[int], biases: Sequence[float]) -> None:
        """Set the number of tokens of each part of what is remembered next, and the bias of each
        part, which is added to its attention logits.
        """
        self.parts, self.bias = parts, None
        self._masks.clear()
        if any(biases):
            bias = torch.tensor(biases).repeat_interleave(torch.tensor(parts))
            self.bias = bias.to(self.reader.device, self.reader.dtype)

    def remember(self, layers: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Replace the remembered tokens in layers of one rotary kind by k, v [layers, Hkv, m, D],
        without positions; the local text moves to the positions after them.
        """
        reader, (m, dim) = self.reader, k.shape[2:]
        before = [self.layers[layer] for layer in layers if layer in self.layers]
        local = self.local if before else 0
        held = self._make_room(layers, m + local)
        first, start = self.first, self.first + m
        end = start + local
        keys = k.to(reader.dtype, memory_format=torch.contiguous_format)
        turned = reader.rotate(layers[0], keys, range(first, start))
        held[0, :, 0, :, first:start, :dim] = turned
        held[1, :, 0, :, first:start, :dim] = v
        self._mark(held[1], first, m)
        if local:
            plain = torch.stack([layer.plain[:, :, :local] for layer in before])
            held[0, ..., start:end, :dim] = reader.rotate(layers[0], plain, range(start, end))
            at = slice(before[0].length - local, before[0].length)
            values = torch.stack([layer.v[:, :, at, :dim] for layer in before])
            held[1, ..., start:end, :dim] = values
        for layer in layers:
            self.layers[layer].remembered, self.layers[layer].length = m, end
        for layer, old in zip(layers, before):
            self.layers[layer].plain = old.plain

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return next((layer.length for layer in self.layers.values()), self.first)

    @property
    def local(self) -> int:
        """Number of tokens of local text."""
        for layer in self.layers.values():
            return layer.length - layer.remembered - self.first
        return 0

    def let_go(self, tokens: int) -> None:
        """Drop the oldest tokens of the local text in every layer; later ones move to lower
        positions.
        """
        for index, layer in self.layers.items() if tokens else ():
            start = self.first + layer.remembered
            left = layer.length - start - tokens
            layer.plain = layer.plain[:, :, tokens : left + tokens].clone()
            kept = self.reader.rotate(index, layer.plain, range(start, start + left))
            kept = pad(kept, (0, layer.k.shape[3] - kept.shape[3]))
            layer.k = torch.cat((layer.k[:, :, :start], kept), 2)
            later = layer.v[:, :, start + tokens : layer.length]
            layer.v = torch.cat((layer.v[:, :, :start], later), 2)
            layer.length -= tokens

    def fork(self) -> "RepositionedAttention":
        """A copy that attends to the same; tokens added to it later do not enter the original."""
        other = replace(self, layers={})
        for index, layer in self.layers.items():
            local = layer.length - layer.remembered - self.first
            # without room: what is appended goes into tensors of its own
            other.layers[index] = replace(
                layer,
                k=layer.k[:, :, : layer.length],
                v=layer.v[:, :, : layer.length],
                plain=layer.plain[:, :, :local],
            )
        return other

    @property
    def first(self) -> int:
        if self.prefix is None:
            return len(self.reader.prefix_ids)
        return self.prefix[0][0].shape[2] if self.prefix else 0

    def _make_room(self, layers: Sequence[int], tokens: int) -> Tensor:
        """Make tensors of layers that begin with the prefix and have room for so many tokens or
        more; return keys and values [2, layers, 1, Hkv, capacity, D + wider], undefined after the
        prefix.
        """
        if self.prefix is None:
            self.prefix = self.reader.prefix(self.adapt)
        reader, shape, first = self.reader, self.reader.shape, self.first
        parts = len(self.parts) if self.observe is not None else 0
        wider = _WIDER * -(-parts // _WIDER)
        size = len(layers), 1, shape.num_kv_heads, -(-(first + tokens + _SPARE) // WHOLE) * WHOLE
        dim = shape.head_dim
        held = torch.empty((2, *size, dim + wider), dtype=reader.dtype, device=reader.device)
        plain = held.new_empty((*size[:3], _SPARE, dim))
        if wider:
            held[..., dim:] = 0
        if self.prefix:
            for half, of_layers in zip(held, zip(*(self.prefix[layer] for layer in layers))):
                half[..., :first, :dim] = torch.stack(of_layers)
        for at, layer in enumerate(layers):
            self.layers[layer] = LayerContext(held[0, at], held[1, at], plain[at], 0, first)
        return held

    def _mask(self, q: Tensor, k: Tensor, window: int | None) -> Tensor:
        """`mask_of` these, plus the bias; cached, because most layers of a step share a mask."""
        asked = q.shape[2], k.shape[2], window
        if asked not in self._masks:
            if len(self._masks) > 2:
                self._masks.clear()
            mask = self._masks[asked] = mask_of(q, k, window)
            if self.bias is not None:
                there = mask[:, self.first :][:, : len(self.bias)]
                there += self.bias[: there.shape[1]]
        return self._masks[asked]


def _put(held: Tensor, at: int, more: Tensor) -> Tensor:
    """Write tokens [1, Hkv, n, D] after the first `at` of a tensor [1, Hkv, capacity, D or more];
    return it, or a larger copy if it has too little room.
    """
    end = at + more.shape[2]
    missing = end - held.shape[2]
    if missing > 0:
        held = pad(held, (0, 0, 0, max(missing, _GROW)))
    held[:, :, at:end, : more.shape[3]] = more
    return held


def mask_of(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """The mask [T, S] that `attention` adds to the scores of the last T of S tokens; q: [B, H, T,
    D], k: [B, Hkv, S, D]. On a GPU it is [H / Hkv * T, S]: the queries of a group are rows, so that
    keys need no copies; rows are aligned as fused attention requires.
    """
    rows, length = q.shape[2], k.shape[2]
    group, wide = 1, length
    if q.device.type != "cpu":
        group, wide = q.shape[1] // k.shape[1], -(-length // _WIDER) * _WIDER
    at = torch.arange(length, device=q.device)
    distance = at[length - rows :, None] - at
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    mask = torch.zeros(group, rows, wide, dtype=q.dtype, device=q.device)
    mask[..., :length].masked_fill_(unseen, float("-inf"))
    return mask.view(-1, wide)[:, :length]


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of rotated q [B, H, T, D] to k, v [B, Hkv, S, D] -> [B, H, T, D].
    mask: from `mask_of`, or bool, True where a row sees a token; None: each row sees all.
    """
    batch, heads, tokens, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, dim)  # the heads of a group as rows
    as_rows = mask is not None and mask.shape[-2] == grouped.shape[2]
    if spec.softcap is not None:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        scores = (grouped @ k.transpose(-1, -2)) * spec.scale
        scores = spec.softcap * (scores / spec.softcap).tanh()
        if mask is not None:
            scores = (scores if as_rows else scores.view(batch, heads, tokens, -1)) + mask
        weights = scores.float().softmax(-1).to(q.dtype).view(batch, heads, tokens, -1)
        return weights @ v.repeat_interleave(heads // k.shape[1], 1)
    if as_rows or tokens == 1:  # on a CPU a single row of bfloat16 is slow by itself
        output = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.scale)
        apart = output.view(batch, k.shape[1], -1, tokens, dim).permute(0, 3, 1, 2, 4)
        return apart.reshape(batch, tokens, heads, dim).transpose(1, 2)
    if q.device.type != "cpu":  # no fused kernel there takes a mask and groups
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True)


@torch.no_grad()
def computed(context: RepositionedAttention, ids: Sequence[int]) -> Sequence[KeysValues]:
    """Read tokens as the next ones of a context; return their keys and values in every layer, empty
    without tokens.
    """
    if not ids:
        return []
    kept: list[KeysValues] = []

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k[0].clone(), v[0].clone()))
        return context.attend(layer_idx, q, k, v)

    reader = context.reader
    given = torch.tensor([list(ids)], device=reader.device)
    context.begin()
    reader.hidden(given, attend, adapt=context.adapt)
    return kept


class StepMasses:
    """Reports for each step the attention mass of its last row on each passage, summed over memory
    layers and heads, after all memory layers have attended.
    """

    def __init__(self, memory_layers: Sequence[int], on_read: OnRead) -> None:
        self.units: Sequence[ReadUnit] = ()  # that are read from the next step on
        self._layers, self._on_read = memory_layers, on_read
        self._masses: dict[int, Tensor] = {}  # of this step

    def __call__(self, layer_idx: int, masses: Tensor) -> None:
        """masses: [H, passages], of one layer."""
        self._masses[layer_idx] = masses
        if layer_idx == self._layers[-1]:
            of_layers = torch.stack([self._masses[layer] for layer in self._layers])
            masses = of_layers.double().sum((0, 1)).cpu()
            self._masses.clear()
            self._on_read(StepReads(self.units, masses.numpy()))


STEP = 256  # tokens of a longer text that are read at once

# What the selector sees of a question: its states behind the local turns, without memory


@torch.no_grad()
def read_on(attention: RepositionedAttention, ids: Sequence[int], most: int) -> Captured:
    """Read a text after what an attention has read, and return what is captured of it. At most
    `most` tokens of local text are held; the oldest are dropped.
    """
    reader, parts = attention.reader, list[Captured]()
    layer = reader.selector.layer
    if not layer or not ids:
        return Captured(list(ids))
    for piece in pieces(ids, attention.local, most):
        held = attention.local
        attention.let_go(min(held, max(0, held + len(piece) - most)))
        given = torch.tensor([list(piece)], device=reader.device)
        attention.begin(layer)
        states = reader.hidden(given, attention.attend, layers=layer, adapt=attention.adapt)
        parts.append(Captured(list(piece), {layer: states[0]}))
    return Captured.joined(parts)


def pieces(ids: Sequence[int], held: int, most: int) -> list[Sequence[int]]:
    """Ids that follow `held` local tokens, split for a window of `most` tokens: one piece if all of
    them fit.
    """
    if held + len(ids) <= most:
        return [ids]
    step = min(STEP, most)
    return [ids[at : at + step] for at in range(0, len(ids), step)]


def capture(reader: PassageModel, ids: Sequence[int]) -> Captured:
    """What the model's selector needs of ids that follow the prefix."""
    return read_on(RepositionedAttention(reader, adapt=reader.adapted_turns), ids, len(ids))


class DialogueBuffer:
    """Ids of a conversation, without the prefix. The selector reads them without memory, each token
    once and only when needed.
    """

    def __init__(self, reader: PassageModel, most: int) -> None:
        """most: maximum number of tokens held."""
        self.ids: list[int] = []  # that have not left, oldest first
        self.tokens = 0  # read so far, with those that left
        self._most = most
        self._attention = RepositionedAttention(reader, adapt=reader.adapted_turns)
        self._seen = 0  # of `ids`, how many that has read
        self._ahead: tuple[list[int], RepositionedAttention] | None = None

    def look_ahead(self, ids: Sequence[int], words: range) -> Captured:
        """What is captured of the `words` of the next turn, before `extend` adds the turn."""
        if self._seen < len(self.ids):
            read_on(self._attention, self.ids[self._seen :], self._most)
            self._seen = len(self.ids)
        attention = self._attention.fork()
        self._ahead = list(ids), attention
        return read_on(attention, ids, self._most).part(words)

    def extend(self, ids: Sequence[int]) -> None:
        """Add ids that the session has read."""
        ahead, self._ahead = self._ahead, None
        self.ids.extend(ids)
        self.tokens += len(ids)
        if ahead is not None and ahead[0] == list(ids):
            self._attention, self._seen = ahead[1], len(self.ids)

    def let_go(self, tokens: int) -> None:
        """Forget the oldest tokens."""
        self.ids = self.ids[tokens:]
        self._seen = max(0, self._seen - tokens)
