"""One token through a decoder's layers as flat graphs: what its modules compute for it, written
down once, without modules, hooks, and the rotation that turns nothing in a forward pass of ours.

A decoder of 30 layers spends a third of a generated token between its operations. Its own code is
traced (torch.fx) with fake tensors; what depends on values, as a router's choice of experts, cannot
be, and such a model goes through its modules.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memstore.hf.attention_seam import ForwardCache, apart, run_layers
from memstore.hf.generation.quantized_products import Multiply
from memstore.hf.generation.quantized_weights import as_loaded
from memstore.hf.generation.traced_layers import (
    LayerGraph,
    alike,
    called,
    layer_graph,
    layers_of,
    whole_graph,
)
from memstore.model.adapter import Attend, Enter

_log = logging.getLogger("memstore")


class TracedStep:
    """Forward passes of one token of each of B rows, traced once for every B."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: attached (memstore.hf.attention_seam)."""
        self._decoder = decoder
        self._tracing = threading.Lock()
        self._traced: dict[tuple[object, ...], _Step | None] = {}

    def __call__(
        self, given: Tensor, attend: Attend, enter: Enter | None, quantized: int
    ) -> Tensor | None:
        """As AttachedDecoder.hidden, of given [B, 1] or [B, 1, hidden_size]; None where the model
        cannot be traced, or gives something else then.

        quantized: which weights of fewer bits the layers have, by number; 0 for those as loaded.
        """
        key = (*given.shape, given.dtype, given.device, quantized)
        with self._tracing:
            if key not in self._traced:
                self._traced = {k: step for k, step in self._traced.items() if k[-1] == key[-1]}
                self._traced[key] = _traced(self._decoder, given, quantized > 0)
            step = self._traced[key]
        return None if step is None else step(given, attend, enter)


@dataclass(frozen=True)
class _Layer:
    """A layer's graph, which layers that are alike share, and what it computes with."""

    forward: Callable[..., Tensor]
    number: int
    inputs: Sequence[Tensor | Multiply]

    def __call__(self, states: Tensor, attend: Attend) -> Tensor:
        return self.forward(attend, self.number, states, *self.inputs)


@dataclass(frozen=True)
class _Step:
    """All layers, and what stands around them: the graph of the whole, and those of the layers."""

    forward: Callable[..., Tensor]
    layers: Sequence[_Layer]

    def __call__(self, given: Tensor, attend: Attend, enter: Enter | None) -> Tensor:
        return self.forward(self.layers, attend, enter, given)


def _traced(decoder: nn.Module, given: Tensor, quantized: bool) -> _Step | None:
    """The step of these rows; None where it cannot be traced or is not what the modules give."""
    try:
        with torch.no_grad():
            with as_loaded(), _unlogged():
                step = _step_of(decoder, given, quantized)
            return step if _same(decoder, step, given) else None
    except Exception:  # whatever a model's own code does under fake tensors
        _log.debug("%s goes through its modules", type(decoder).__name__, exc_info=True)
        return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without what torch logs of an operation that it cannot trace: the modules compute it then."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _step_of(decoder: nn.Module, given: Tensor, quantized: bool) -> _Step:
    calls = called(decoder, given)
    graphs: dict[object, LayerGraph] = {}
    layers = []
    for number, (layer, call) in enumerate(zip(layers_of(decoder), calls, strict=True)):
        key = alike(layer, call)
        if key not in graphs:
            graphs[key] = layer_graph(layer, call, quantized)
        graph = graphs[key]
        layers.append(_Layer(graph.forward, number, graph.inputs(layer, quantized)))
    return _Step(whole_graph(decoder, given, calls), layers)


def _same(decoder: nn.Module, step: _Step, given: Tensor) -> bool:
    """Does a step give what the modules give, for an attention that shows every part of it?"""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + (k - 2 * v).repeat_interleave(group, 1) * (1 + layer)

    expected = run_layers(decoder, given, ForwardCache(attend))
    return apart(step(given, attend, None), expected, expected.dtype) is None
