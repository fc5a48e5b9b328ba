"""A decoding step of a session as a CUDA graph: the kernels of all layers are recorded once and
launched together, because launching them one by one takes longer than running them.

A graph always uses the tensors that it was recorded with. So a recorded step writes keys and values
at a position that a tensor holds, and attends to all allocated room, masked.
"""

import logging
import threading
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.model.passages.repositioned_attention import (
    WHOLE,
    LayerContext,
    PassageModel,
    RepositionedAttention,
    attention,
)
from memstore.model.rotary import Positions

_BEFORE = 4  # tokens that an answer begins with without: to record takes as long as some of them
_LATER = 64  # tokens after which it is tried again where memory was short
_ROOM = 256  # tokens that a recorded step has room for, at least

_log = logging.getLogger("memstore")
_unrecorded: WeakSet[PassageModel] = WeakSet()  # whose own code looks at what it computes


class StepGraph:
    """The recorded step of one session, for one thread."""

    def __init__(self, reader: PassageModel, context: RepositionedAttention) -> None:
        self._reader, self._context = reader, context
        self._step: RecordedStep | None = None
        self._before = 0  # tokens of this answer that were read without a graph
        self._next = -1  # where the next token of this answer goes

    def read(self, token: int) -> Tensor | None:
        """Read a generated token -> the state [hidden_size] after it; None, with nothing read, if
        there is no graph for it: read it kernel by kernel then.
        """
        if self._reader in _unrecorded:
            return None
        length = self._context.length
        if length != self._next:  # other text was read: another answer
            self._before = 0
        self._next = length + 1
        if self._step is None or not self._step.fits():
            self._step, self._before = None, self._before + 1
            if self._before <= _BEFORE:
                return None
        try:
            self._step = self._step or RecordedStep(self._reader, self._context)
            return self._step.read(token)
        except torch.OutOfMemoryError:
            self._step, self._before = None, -_LATER
            return None
        except RuntimeError:
            _log.debug("a step of %s is no CUDA graph", type(self._reader).__name__, exc_info=True)
            _unrecorded.add(self._reader)
            self._step = None
            return None


class RecordedStep:
    """A decoding step as a CUDA graph over the current tensors of a context.

    The first token runs without a graph, the second records one, and later tokens replay it. On a
    CPU no graph is recorded.
    """

    def __init__(self, reader: PassageModel, context: RepositionedAttention) -> None:
        self._reader, self._context = reader, context
        layers = context.layers.values()
        for layer in layers:
            _make_room(layer, context)
        # weakly: what is read next may stand where these stood
        self._held = [tuple(map(ref, (layer.k, layer.v, layer.plain))) for layer in layers]
        self._rows = min(layer.k.shape[2] for layer in layers)
        self._local_rows = min(layer.plain.shape[2] for layer in layers)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False
        device = reader.device
        # the token, and where it goes: among everything, and in the local text
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._at, self._local = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._next = -1  # what stands in _at; -1 where nobody knows
        self._grid = torch.arange(self._rows, device=device)
        self._added = torch.zeros(self._rows, dtype=reader.dtype, device=device)  # to logits
        if context.bias is not None:
            self._added[context.first :][: len(context.bias)] = context.bias
        # what the layers of a pass share, or leave behind: positions; masks by window; and masses
        # [H, parts], by layer
        self._positions = Positions(self._at, self._rows)
        self._masks: dict[int | None, Tensor] = {}
        self._masses: dict[int, Tensor] = {}
        self._state = torch.empty(0)

    def fits(self) -> bool:
        """Whether the context still has these tensors, and room for a token."""
        context = self._context
        layers = context.layers.values()
        return (
            len(layers) == len(self._held)
            and context.length < self._rows
            and context.local < self._local_rows
            and all(
                (k() is layer.k and v() is layer.v and plain() is layer.plain)
                for layer, (k, v, plain) in zip(layers, self._held)
            )
        )

    @torch.no_grad()
    def read(self, token: int) -> Tensor:
        """Read a token -> the state [hidden_size] after it. Raises RuntimeError if the step cannot
        be recorded; then nothing was read.
        """
        context = self._context
        length = context.length
        self._ids.fill_(token)
        if length != self._next:
            self._at.fill_(length)
            self._local.fill_(context.local)
        self._next = -1
        if not self._ran or self._reader.device.type != "cuda":
            self._run()
            self._ran = True
        elif self._graph is None:
            self._graph = self._record()
        if self._graph is not None:
            self._graph.replay()
        state = self._state.clone()
        self._next = length + 1
        for layer in context.layers.values():
            layer.length += 1
        if context.observe is not None:
            for layer_idx, masses in self._masses.items():
                context.observe(layer_idx, masses)
        return state

    def _run(self) -> None:
        self._positions, self._masks, self._masses = Positions(self._at, self._rows), {}, {}
        self._state = self._reader.hidden(
            self._ids, self._attend, quantized=True, adapt=self._context.adapt
        )[0, -1]
        self._at.add_(1)
        self._local.add_(1)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph, device = torch.cuda.CUDAGraph(), self._reader.device
        here, stream = torch.cuda.current_stream(device), _stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            # others' threads may allocate meanwhile
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run()
            finally:
                graph.capture_end()
        here.wait_stream(stream)
        return graph

    def _attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As RepositionedAttention.attend, for one row, at a position held on the device."""
        context, layer, dim = self._context, self._context.layers[layer_idx], q.shape[3]
        layer.plain.index_copy_(2, self._local, k)
        turned = self._reader.rotate(layer_idx, torch.cat((q, k), 1), self._positions)
        wider = layer.k.shape[3] - dim
        q, k = turned.split((q.shape[1], k.shape[1]), 1)
        q = pad(q, (0, wider)) if wider else q
        layer.k[..., :dim].index_copy_(2, self._at, k)
        layer.v[..., :dim].index_copy_(2, self._at, v)
        spec, room = self._reader.forms[layer_idx], self._rows
        output = attention(
            q, layer.k[:, :, :room], layer.v[:, :, :room], spec, self._mask(spec.window)
        )
        if not wider:
            return output
        self._masses[layer_idx] = output[0, :, -1, dim : dim + len(context.parts)]
        return output[..., :dim]

    def _mask(self, window: int | None) -> Tensor:
        """[1, room], added to the row's scores: -inf for tokens that it does not see."""
        if window not in self._masks:
            hidden = self._grid > self._at
            if window is not None:
                hidden |= self._grid <= self._at - window
            self._masks[window] = self._added.masked_fill(hidden, float("-inf"))[None]
        return self._masks[window]


_recording = threading.local()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this thread records: one, because cuBLAS has a workspace for each."""
    streams: dict[torch.device, torch.cuda.Stream] = _recording.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def _make_room(layer: LayerContext, context: RepositionedAttention) -> None:
    """Copy keys and values into tensors of their own, with room."""
    room = -(-(layer.length + _ROOM) // WHOLE) * WHOLE
    if layer.k.shape[2] - layer.length < _ROOM or layer.k.shape[2] % WHOLE:
        layer.k, layer.v = (
            pad(x[:, :, : layer.length], (0, 0, 0, room - layer.length)) for x in (layer.k, layer.v)
        )
    for held in (layer.k, layer.v):  # a masked row counts nothing only if it is a number
        held[:, :, layer.length :] = 0
    missing = context.local + _ROOM - layer.plain.shape[2]
    if missing > 0:
        layer.plain = pad(layer.plain, (0, 0, 0, missing))
