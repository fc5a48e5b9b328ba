"""A decoder's linear layers a second time, in 8 or 4 bits, for the tokens that are generated: each
reads every weight once, so that it costs what their bytes cost.

What is read in, and a question, go through the layers as they were loaded: many tokens share a
weight there, and what is stored shall not depend on it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard, cast, get_args

import torch
from torch import Tensor, nn

from memstore.errors import InvalidConfig
from memstore.hf.generation import quantized_products
from memstore.hf.generation.quantized_products import Multiply, Weights, multiply, quantized

MOST_ROWS = 8  # tokens of a step; more of them are multiplied faster by the weights as loaded

_active = threading.local()  # .now: this thread's forward pass takes quantized weights


def weights_named(name: str, device: torch.device) -> Weights:
    """Which weights a model on a device generates with. Raises InvalidConfig for a name that is
    none of Weights, and for int8 and int4 elsewhere than on a CPU.
    """
    for known in get_args(Weights):
        if name == known:
            if name in ("int8", "int4") and device.type != "cpu":
                raise InvalidConfig(f"{name} weights are for a CPU; choose auto or full")
            return cast(Weights, known)
    raise InvalidConfig(f"weights {name!r} are unknown; choose {', '.join(get_args(Weights))}")


@contextmanager
def as_loaded() -> Iterator[int]:
    """Within QuantizedWeights.used, this thread's forward passes multiply by the weights as they
    were loaded.
    """
    with _taking(False):
        yield 0


@contextmanager
def _taking(quantized: bool) -> Iterator[None]:
    before, _active.now = getattr(_active, "now", False), quantized
    try:
        yield
    finally:
        _active.now = before


class QuantizedWeights:
    """Within `used` the linear layers of a decoder and its head multiply by quantized weights, in
    forward passes of this thread that have at most MOST_ROWS tokens. They are made when they are
    first used, and again once weights have changed; their products are computed in bfloat16.
    """

    def __init__(self, layers: nn.Module, head: nn.Module, weights: Weights) -> None:
        self._linear = [part for part in layers.modules() if _is_plain(part)]
        self._head = head if _is_plain(head) else None
        self._weights: Weights = weights
        self._making = threading.Lock()
        self._of: object = None  # the state of the weights that they were made of
        self._times = 0

    @contextmanager
    def used(self, *, look: bool = True) -> Iterator[int]:
        """Within it this thread's forward passes multiply by them. Gives how often they were made:
        another number whenever they are others, 0 where there are none. look: whether weights have
        changed since; once a token is enough.
        """
        if self._weights == "full" or not self._linear or not self._on_cpu:
            yield 0
            return
        with self._making:
            if (look or not self._times) and self._of != (state := self._state):
                self._make()
                self._of, self._times = state, self._times + 1
        with _taking(True):
            yield self._times

    @property
    def _on_cpu(self) -> bool:
        return all(linear.weight.device.type == "cpu" for linear in self._linear[-1:])

    @property
    def _state(self) -> object:
        """Where all weights are, and how often each was written to."""
        parts = self._linear if self._head is None else [*self._linear, self._head]
        # past Module.__getattr__, which takes longer than all the rest
        weights = cast(list[Tensor], [one._parameters["weight"] for one in parts])
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def _make(self) -> None:
        for linear in self._linear:
            _attach(linear, quantized(linear.weight.detach(), self._weights))
        if self._head is not None:  # what it rounds shows in every token: never 4 bits of 8
            weight = self._head.weight.detach()
            _attach(self._head, quantized(weight, "auto"))


class _Linear(nn.Linear):
    """A linear layer that has its weights a second time, for few rows."""

    few: Multiply

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., out_features]."""
        rows = x.numel() // x.shape[-1]
        if rows > MOST_ROWS or not getattr(_active, "now", False):
            return super().forward(x)
        return multiply(self.few, x, self.bias)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A linear layer, and nothing that is made of one, as an adapter beside it."""
    return type(module) in (nn.Linear, _Linear)


def _attach(linear: nn.Linear, multiply: Multiply | None) -> None:
    linear.__class__ = nn.Linear if multiply is None else _Linear
    linear.__dict__.pop("few", None)
    if multiply is not None:
        cast(_Linear, linear).few = multiply


def join(linear: Sequence[nn.Module]) -> Multiply | None:
    """The product with the quantized weights of several layers at once, one behind the other, which
    they have only there from then on; None where they cannot be joined.
    """
    layers = [cast(_Linear, one) for one in linear]
    made = quantized_products.join(
        [one.few for one in layers], [one.out_features for one in layers]
    )
    if made is None:
        return None
    whole, parts = made
    for layer, part in zip(layers, parts, strict=True):
        layer.few = part
    return whole
