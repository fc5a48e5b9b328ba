"""One token through a decoder's layers as flat graphs: what its modules compute for it, written
down once, without modules, hooks, and the rotation that turns nothing in a forward pass of ours.

A decoder of 30 layers spends a third of a generated token between its operations. Its own code is
traced (torch.fx) with fake tensors; what depends on values, as a router's choice of experts, cannot
be, and such a model goes through its modules.
"""

import copy
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm
from torch.utils import _pytree as pytree

from memstore.hf.attention_seam import ForwardCache, active, difference_beyond_rounding, run_layers
from memstore.hf.quantized_weights import Multiply, as_loaded, join, multiply, products
from memstore.hf.reading_adapter import adapted, low_rank_of
from memstore.model.adapter import Attend, Enter

_aten = torch.ops.aten


# Graphs


class Graph:
    """The traced graph of a function; methods edit it, `compiled` makes a function of it."""

    def __init__(self, function: Callable[..., Tensor], *args: Any) -> None:
        self._module = make_fx(
            function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*args)
        self._graph = self._module.graph
        self._graph.set_codegen(fx.graph.CodeGen())
        self.inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        (result,) = pytree.tree_leaves(output.args)
        output.args = (result,)

    def add_input(self, name: str) -> fx.Node:
        """Add an input before the traced inputs and after those added before."""
        with self._graph.inserting_before(self.inputs[0]):
            return self._graph.placeholder(name)

    def replace_op(
        self, op: object, function: Callable[..., Any], first: tuple[fx.Node, ...]
    ) -> None:
        """Replace an operation by a function, which gets `first` as leading arguments."""
        for node in self._graph.nodes:
            if node.target is op:
                node.target, node.args = function, (*first, *node.args)

    def use_quantized(self, weights: Container[fx.Node]) -> None:
        """Use `multiply` in linear layers of these weights: the inputs will be Multiply objects."""
        for node in self._graph.nodes:
            if node.target is _aten.linear.default and node.args[1] in weights:
                x, weight, *bias = node.args
                node.target, node.args = multiply, (weight, x, *bias)

    def fuse_norms(self) -> None:
        """Fuse the seven or eight operations of each RMS norm into one (one kernel on a GPU).
        It rounds once instead of twice.
        """
        for node in list(self._graph.nodes):
            norm = _norm_at(node) if node.target is _aten.rsqrt.default else None
            if norm is not None:
                with self._graph.inserting_before(norm.end):
                    width = norm.x.meta["val"].shape[-1:]
                    arguments = (norm.x, tuple(width), norm.weight, norm.eps)
                    fused = self._graph.call_function(rms_norm, arguments)
                fused.meta = dict(norm.end.meta)
                norm.end.replace_all_uses_with(fused)

    def quantized_products(self) -> Iterable[list[fx.Node]]:
        """Products with quantized weights, grouped by their input."""
        groups: dict[Any, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.target is multiply:
                groups.setdefault(node.args[1], []).append(node)
        return groups.values()

    def join_products(self, nodes: Sequence[fx.Node], rows: Sequence[int]) -> None:
        """Replace products by slices of one product with a new last input; rows: of each slice."""
        last = next(n for n in reversed(self._graph.nodes) if n.op == "placeholder")
        with self._graph.inserting_after(last):
            joined = self._graph.placeholder(f"joined_{nodes[0].name}")
        with self._graph.inserting_before(nodes[0]):
            product = self._graph.call_function(multiply, (joined, nodes[0].args[1]))
        start = 0
        for node, count in zip(nodes, rows, strict=True):
            node.target, node.args = _slice, (product, start, count, *node.args[2:])
            start += count

    def compiled(self) -> Callable[..., Tensor]:
        """Drop multiplications by one and additions of zero (RoPE turned off), then compile."""
        _fold(self._module)
        self._graph.eliminate_dead_code()
        for node in self._graph.nodes:
            if node.target in _METHODS:
                node.op, node.target = "call_method", _METHODS[node.target]
        self._graph.lint()
        self._module.recompile()
        return cast(Callable[..., Tensor], self._module.forward)


class _Norm(NamedTuple):
    """An RMS norm of x, multiplied by a weight; end: its last operation."""

    x: fx.Node
    weight: fx.Node
    eps: float
    end: fx.Node


def _norm_at(root: Any) -> _Norm | None:
    """The RMS norm whose rsqrt is `root`; None if its operations are not exactly those of one."""
    shifted = _call_of(root.args[0], _aten.add.Tensor)
    mean = shifted and _call_of(shifted.args[0], _aten.mean.dim)
    square = mean and _call_of(mean.args[0], _aten.pow.Tensor_Scalar)
    if not (square and square.args[1] == 2 and mean.args[1] == [-1] and len(root.users) == 1):
        return None
    wide, eps = square.args[0], shifted.args[1]
    before = _call_of(wide, _aten.to.dtype)
    x = before.args[0] if before else wide
    (product,) = root.users
    if product.target is not _aten.mul.Tensor or set(product.args) != {wide, root}:
        return None
    value = x.meta["val"]
    if len(product.users) == 1:
        (rounded,) = product.users
        if rounded.target is _aten.to.dtype and rounded.meta["val"].dtype == value.dtype:
            product = rounded
    if len(product.users) != 1:
        return None
    (end,) = product.users
    others = [arg for arg in end.args if isinstance(arg, fx.Node) and arg is not product]
    if end.target is not _aten.mul.Tensor or len(others) != 1 or not isinstance(eps, float):
        return None
    weight = others[0].meta["val"]
    same = (weight.shape, weight.dtype) == (value.shape[-1:], value.dtype) and (
        end.meta["val"].dtype == value.dtype
    )
    return _Norm(x, others[0], eps, end) if same and others[0].op == "placeholder" else None


def _call_of(node: Any, op: object) -> Any:
    """The node if it is a call of this operation."""
    return node if isinstance(node, fx.Node) and node.target is op else None


def _fold(module: fx.GraphModule) -> None:
    """Remove multiplications by ones and additions of zeros."""
    known: dict[fx.Node, Tensor] = {}  # constants: the same in every call
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif node.target in _RESHAPES and node.args[0] in known:
            known[node] = node.target(known[node.args[0]], *node.args[1:], **node.kwargs)
        elif node.target is _aten.mul.Tensor and node.args[1] in known:
            _fold_product(node, known)
        elif node.target is _aten.add.Tensor and node.args[1] in known:
            zero = not known[node.args[1]].any()
            if zero and _same_shape_and_dtype(node, node.args[0]):
                node.replace_all_uses_with(node.args[0])


# a tensor's method takes half the time of a call of the operation by name
_METHODS = {
    _aten.add.Tensor: "add",
    _aten.mean.dim: "mean",
    _aten.mul.Tensor: "mul",
    _aten.pow.Tensor_Scalar: "pow",
    _aten.reshape.default: "reshape",
    _aten.rsqrt.default: "rsqrt",
    _aten.to.dtype: "to",
    _aten.transpose.int: "transpose",
    _aten.view.default: "view",
}
_RESHAPES = {_aten.unsqueeze.default, _aten.view.default, _aten.to.dtype, _aten.slice.Tensor}


def _fold_product(node: fx.Node, known: dict[fx.Node, Tensor]) -> None:
    x, factor = node.args[0], known[cast(fx.Node, node.args[1])]
    if bool((factor == 1).all()) and _same_shape_and_dtype(node, x):
        node.replace_all_uses_with(cast(fx.Node, x))
    elif not factor.any():
        known[node] = torch.zeros((), dtype=factor.dtype)


def _same_shape_and_dtype(node: fx.Node, other: Any) -> bool:
    a, b = node.meta["val"], other.meta["val"]
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _slice(product: Tensor, start: int, rows: int, bias: Tensor | None = None) -> Tensor:
    part = product.narrow(-1, start, rows)
    return part if bias is None else part + bias


# The layers of a decoder, traced

_ATTEND, _LAYER = "memstore::attend", "memstore::layer"


@torch.library.custom_op(_ATTEND, mutates_args=())
def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@_attended.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op(_LAYER, mutates_args=())
def _through(states: Tensor, layer: int) -> Tensor:
    return torch.empty_like(states)


@_through.register_fake
def _(states: Tensor, layer: int) -> Tensor:
    return torch.empty_like(states)


@dataclass(frozen=True)
class Call:
    """How a decoder called one of its layers, and what came back."""

    states: Tensor
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any

    def of(self, states: Tensor) -> Any:
        """The same output with these states."""
        if isinstance(self.output, tuple):
            return (states, *self.output[1:])
        return states


def called(decoder: nn.Module, given: Tensor) -> list[Call]:
    """How every layer is called for a token."""
    calls: list[Call] = []
    thread = threading.get_ident()

    def seen(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:
            return
        rest = {name: value for name, value in named.items() if name != "hidden_states"}
        states = args[0] if args else named["hidden_states"]
        calls.append(Call(states, args[1:], rest, output))

    hooks = [layer.register_forward_hook(seen, with_kwargs=True) for layer in layers_of(decoder)]
    try:
        run_layers(decoder, given, ForwardCache(lambda layer, q, k, v: q))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    return list(cast(nn.ModuleList, decoder.layers))


def alike(layer: nn.Module, call: Call) -> object:
    """Equal for layers that compute the same, with other weights."""
    plain = (int, float, bool, str, type(None))
    settings = [
        (name, type(part), attribute, value)
        for name, part in layer.named_modules()
        for attribute, value in sorted(vars(part).items())
        if isinstance(value, plain) and attribute != "layer_idx"
    ]
    sizes = [(name, value.shape, value.dtype) for name, value in _values(layer).items()]
    few = [
        (name, type(getattr(part, "few", None)), low_rank_of(part) is None)
        for name, part in layer.named_modules()
    ]
    given = [(name, id(value)) for name, value in call.named.items()]
    return str((settings, sizes, few, given))


def _values(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def _joined(layer: nn.Module, names: Sequence[str], adapted: bool) -> Multiply | None:
    return join([layer.get_submodule(name.removesuffix(".weight")) for name in names], adapted)


@dataclass(frozen=True)
class LayerGraph:
    """forward: (attend, layer_idx, states, *inputs) -> states. together: names of weights that are
    multiplied by in one product.
    """

    forward: Callable[..., Tensor]
    together: Sequence[Sequence[str]]

    def inputs(self, layer: nn.Module, quantized: bool, adapt: bool) -> list[Any]:
        """What it takes of a layer."""
        values: dict[str, Any] = _values(layer) | products(layer, quantized, adapt)
        return [*values.values(), *(_joined(layer, names, adapt) for names in self.together)]


def layer_graph(layer: nn.Module, call: Call, quantized: bool, adapt: bool) -> LayerGraph:
    values = _values(layer)
    named = {
        name: ForwardCache(lambda _, q, k, v: _attended(q, k, v))
        if isinstance(value, ForwardCache)
        else value
        for name, value in call.named.items()
    }

    def computed(states: Tensor, given: list[Tensor]) -> Tensor:
        with active(next(v for v in named.values() if isinstance(v, ForwardCache))):
            output = functional_call(layer, dict(zip(values, given)), (states, *call.others), named)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    graph = Graph(computed, call.states, list(values.values()))
    few = products(layer, quantized, adapt)
    if _has_norms(call.states.device):
        graph.fuse_norms()
    names = {node: name for node, name in zip(graph.inputs[1:], values, strict=True) if name in few}
    graph.use_quantized(names)
    together = []
    for nodes in graph.quantized_products():
        of = [names[cast(fx.Node, node.args[0])] for node in nodes]
        if len(of) > 1 and _joined(layer, of, adapt) is not None:
            graph.join_products(nodes, [len(values[name]) for name in of])
            together.append(of)
    attend, number = graph.add_input("attend"), graph.add_input("layer_idx")
    graph.replace_op(torch.ops.memstore.attend.default, _attend, (attend, number))
    return LayerGraph(graph.compiled(), together)


def _has_norms(device: torch.device) -> bool:
    """Has a device an RMS norm as one operation?"""
    return device.type != "cpu"


def whole_graph(decoder: nn.Module, given: Tensor, calls: Sequence[Call]) -> Callable[..., Tensor]:
    """(layers, attend, enter, given) -> states behind the last norm."""
    stand_in = copy.copy(decoder)
    stand_in._modules = dict(decoder._modules)
    stand_in.layers = nn.ModuleList(
        _StandIn(layer, number, call)
        for number, (layer, call) in enumerate(zip(layers_of(decoder), calls))
    )
    graph = Graph(lambda ids: run_layers(stand_in, ids, ForwardCache(lambda _, q, k, v: q)), given)
    layers, attend, enter = (graph.add_input(name) for name in ("layers", "attend", "enter"))
    graph.replace_op(torch.ops.memstore.layer.default, _go_through, (layers, attend, enter))
    return graph.compiled()


class _StandIn(nn.Module):
    """In the place of a layer while what stands around the layers is traced."""

    def __init__(self, layer: nn.Module, number: int, call: Call) -> None:
        super().__init__()
        self._of = (layer, number, call)  # a tuple: no part of this module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One operation."""
        _, number, call = self._of
        return call.of(_through(hidden_states, number))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"][0], name)


def _attend(attend: Attend, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(number, q, k, v)


def _go_through(
    layers: Sequence[Callable[[Tensor, Attend], Tensor]],
    attend: Attend,
    enter: Enter | None,
    states: Tensor,
    number: int,
) -> Tensor:
    if enter is not None:
        enter(number, states)
    return layers[number](states, attend)


_log = logging.getLogger("memstore")


class TracedStep:
    """Forward passes of one token of each of B rows, traced once for every B."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: attached (memstore.hf.attention_seam)."""
        self._decoder = decoder
        self._tracing = threading.Lock()
        self._traced: dict[tuple[object, ...], _Step | None] = {}

    def __call__(
        self,
        given: Tensor,
        attend: Attend,
        enter: Enter | None,
        quantized: int,
        adapt: bool = False,
    ) -> Tensor | None:
        """As AttachedDecoder.hidden, of given [B, 1] or [B, 1, hidden_size]; None where the model
        cannot be traced, or gives something else then.

        quantized: which weights of fewer bits the layers have, by number; 0 for those as loaded.
        adapt: with the model's reading adapter.
        """
        key = (*given.shape, given.dtype, given.device, adapt, quantized)
        with self._tracing:
            if key not in self._traced:
                self._traced = {k: step for k, step in self._traced.items() if k[-1] == key[-1]}
                self._traced[key] = _traced(self._decoder, given, quantized > 0, adapt)
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


def _traced(decoder: nn.Module, given: Tensor, quantized: bool, adapt: bool) -> _Step | None:
    """The step of these rows; None where it cannot be traced or is not what the modules give."""
    try:
        with torch.no_grad():
            with as_loaded(), _unlogged(), adapted(False):
                step = _step_of(decoder, given, quantized, adapt)
            with adapted(adapt):
                return step if _same(decoder, step, given) else None
    except Exception:  # whatever a model's own code does under fake tensors
        _log.debug("%s goes through its modules", type(decoder).__name__, exc_info=True)
        return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log about operations that it cannot trace: the modules compute them then."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _step_of(decoder: nn.Module, given: Tensor, quantized: bool, adapt: bool) -> _Step:
    calls = called(decoder, given)
    graphs: dict[object, LayerGraph] = {}
    layers = []
    for number, (layer, call) in enumerate(zip(layers_of(decoder), calls, strict=True)):
        key = alike(layer, call)
        if key not in graphs:
            graphs[key] = layer_graph(layer, call, quantized, adapt)
        graph = graphs[key]
        layers.append(_Layer(graph.forward, number, graph.inputs(layer, quantized, adapt)))
    return _Step(whole_graph(decoder, given, calls), layers)


def _same(decoder: nn.Module, step: _Step, given: Tensor) -> bool:
    """Does a step give what the modules give, for an attention that shows every part of it?"""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + (k - 2 * v).repeat_interleave(group, 1) * (1 + layer)

    expected = run_layers(decoder, given, ForwardCache(attend))
    found = step(given, attend, None)
    return difference_beyond_rounding(found, expected, expected.dtype) is None
