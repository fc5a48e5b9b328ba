"""Tokens through a decoder's layers as flat graphs: what the modules of a layer compute for them,
written down once, without modules, hooks, and the rotation that turns nothing in a pass of ours.

A decoder of 30 layers spends a third of a generated token between its operations, and on a GPU most
of a question. Its own code is traced (torch.fx) with fake tensors; what depends on values, as a
router's choice of experts, cannot be, and such a model goes through its modules.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm
from torch.utils import _pytree as pytree

from memstore.hf.attention_seam import (
    ForwardCache,
    Stopped,
    active,
    difference_beyond_rounding,
    run_layers,
)
from memstore.hf.quantized_weights import Multiply, join, multiply, products, taking
from memstore.hf.reading_adapter import LowRank, adapted, low_rank_of, merge, merged_of
from memstore.model.adapter import Attend, Enter

_aten = torch.ops.aten
_ROWS = 1009  # that a layer is traced with: no other size in it is the same


# Graphs


def traced(function: Callable[..., Tensor], *args: Any) -> fx.GraphModule:
    """The graph of a function, which gives one tensor; `compiled` makes a function of it."""
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(
        *args
    )
    module.graph.set_codegen(fx.graph.CodeGen())
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    (result,) = pytree.tree_leaves(output.args)
    output.args = (result,)
    return module


def compiled(module: fx.GraphModule) -> Callable[..., Tensor]:
    """Drop multiplications by one and additions of zero (RoPE turned off), then compile."""
    _fold(module)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
    module.graph.lint()
    module.recompile()
    return cast(Callable[..., Tensor], module.forward)


def _join_products(graph: fx.Graph, nodes: Sequence[fx.Node], rows: Sequence[int]) -> None:
    """Replace products by slices of one product with a new last input; rows: of each slice."""
    last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    with graph.inserting_after(last):
        joined = graph.placeholder(f"joined_{nodes[0].name}")
    with graph.inserting_before(nodes[0]):
        product = graph.call_function(multiply, (joined, nodes[0].args[1]))
    start = 0
    for node, count in zip(nodes, rows, strict=True):
        node.target, node.args = _slice, (product, start, count, *node.args[2:])
        start += count


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


@torch.library.custom_op("memstore::attend", mutates_args=())
def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@_attended.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@dataclass(frozen=True)
class Call:
    """How a decoder called one of its layers, and what came back."""

    states: Tensor
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any


def called(decoder: nn.Module, ids: Tensor) -> list[Call]:
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
        run_layers(decoder, ids, ForwardCache(lambda layer, q, k, v: q))
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
        (name, type(getattr(part, "few", None)), low_rank_of(part) is None, merged_of(part) is None)
        for name, part in layer.named_modules()
    ]
    given = [(name, id(value)) for name, value in call.named.items()]
    return str((settings, sizes, few, given))


def _values(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def _joined(layer: nn.Module, names: Sequence[str], adapted: bool) -> Multiply | None:
    return join([layer.get_submodule(name.removesuffix(".weight")) for name in names], adapted)


def _inputs(
    layer: nn.Module, together: Sequence[Sequence[str]], quantized: bool, adapt: bool
) -> list[Any]:
    """What the graph of a layer takes of it."""
    joined = [_joined(layer, names, adapt) for names in together]
    values: dict[str, Any] = _values(layer) | products(layer, quantized, adapt)
    return [*values.values(), *joined]


def layer_graph(
    layer: nn.Module, call: Call, quantized: bool, adapt: bool
) -> tuple[Callable[..., Tensor], list[list[str]]]:
    """(attend, layer_idx, states, *inputs) -> states; and names of weights that are multiplied by
    in one product.
    """
    values, twin = _values(layer), _twin(layer)
    named = {
        name: ForwardCache(lambda _, q, k, v: _attended(q, k, v))
        if isinstance(value, ForwardCache)
        else value
        for name, value in call.named.items()
    }

    def computed(states: Tensor, given: list[Tensor]) -> Tensor:
        with active(next(v for v in named.values() if isinstance(v, ForwardCache))):
            output = functional_call(twin, dict(zip(values, given)), (states, *call.others), named)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    if _has_norms(call.states.device):
        fuse_norms(twin)
    states = call.states.repeat(_ROWS, 1, 1)
    module = traced(computed, states, list(values.values()))
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    few = products(layer, quantized, adapt)
    names = {node: name for node, name in zip(inputs[1:], values, strict=True) if name in few}
    groups: dict[Any, list[fx.Node]] = {}  # products with these weights, by their input
    for node in graph.nodes:
        if node.target is _aten.linear.default and node.args[1] in names:
            x, weight, *bias = node.args
            node.target, node.args = multiply, (weight, x, *bias)
            groups.setdefault(x, []).append(node)
    together = []
    for nodes in groups.values():
        of = [names[cast(fx.Node, node.args[0])] for node in nodes]
        if len(of) > 1 and _joined(layer, of, adapt) is not None:
            _join_products(graph, nodes, [len(values[name]) for name in of])
            together.append(of)
    with graph.inserting_before(inputs[0]):
        first = graph.placeholder("attend"), graph.placeholder("layer_idx")
    for node in graph.nodes:
        if node.target is torch.ops.memstore.attend.default:
            node.target, node.args = _attend, (*first, *node.args)
    _of_any_rows(graph)
    return compiled(module), together


def _of_any_rows(graph: fx.Graph) -> None:
    """Put the number of the states' rows in the place of _ROWS."""
    *_, last = inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(last):
        rows = graph.call_method("size", (inputs[2], 0))
    for node in graph.nodes:
        if node is not rows:
            node.args = fx.node.map_aggregate(node.args, lambda x: rows if x == _ROWS else x)


def _has_norms(device: torch.device) -> bool:
    """Has a device an RMS norm as one operation?"""
    return device.type != "cpu"


def _twin(layer: nn.Module) -> nn.Module:
    """A copy of a layer's modules that shares its weights. Tracing puts fake tensors in their
    place, which other threads, in the layer itself, must not meet.
    """
    twin = copy.copy(layer)
    twin._parameters, twin._buffers = dict(layer._parameters), dict(layer._buffers)
    twin._modules = {name: part and _twin(part) for name, part in layer._modules.items()}
    return twin


def fuse_norms(layer: nn.Module) -> None:
    """Make the RMS norms of a layer one operation each, which rounds once, not twice."""
    norms: list[Any] = [part for part in layer.modules() if _is_rms_norm(part)]
    for norm in norms:
        norm.forward = partial(_rms_norm, norm)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return rms_norm(x, norm.weight.shape, norm.weight, eps)


def _is_rms_norm(part: Any) -> bool:
    """Does a module compute what `_rms_norm` does?"""
    if "RMSNorm" not in type(part).__name__ or len(list(part.parameters())) != 1:
        return False
    weight = part.weight
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device, dtype=weight.dtype)
    x = x.view(3, -1)
    return difference_beyond_rounding(_rms_norm(part, x), part(x), weight.dtype) is None


class _TracedLayer(nn.Module):
    """In the place of a layer: its graph."""

    def __init__(
        self,
        layer: nn.Module,
        number: int,
        call: Call,
        forward: Callable[..., Tensor],
        inputs: Sequence[Any],
    ) -> None:
        """forward: the layer's graph; inputs: what it takes of the layer."""
        super().__init__()
        self._of = (layer, number, call, forward, inputs)  # a tuple: no part of this module

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """States as they enter the layer -> what the layer returns."""
        _, number, call, forward, inputs = self._of
        cache = next(one for one in (*args, *named.values()) if isinstance(one, ForwardCache))
        if cache.enter is not None:
            cache.enter(number, hidden_states)
        if cache.stop == number:
            raise Stopped
        states = forward(cache.attend, number, hidden_states, *inputs)
        return (states, *call.output[1:]) if isinstance(call.output, tuple) else states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_of"][0], name)


def _attend(attend: Attend, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(number, q, k, v)


_log = logging.getLogger("memstore")
_COMPARED = 5  # tokens of a text by which its graphs are compared with the modules


class TracedStep:
    """Forward passes of one token of each of B rows, or of the tokens of one text."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: attached (memstore.hf.attention_seam)."""
        self._decoder = decoder
        self._first = next((x for x in decoder.modules() if isinstance(x, nn.Linear)), decoder)
        self._updates: list[LowRank | None] = []  # of it, for which something was traced
        self._tracing = threading.Lock()
        self._traced: dict[tuple[object, ...], nn.Module | None] = {}

    def __call__(
        self, ids: Tensor, attend: Attend, enter: Enter | None, quantized: bool,
        adapt: bool = False, layers: int | None = None,
    ) -> Tensor | None:  # fmt: skip
        """As ModelAdapter.hidden, of ids [B, 1] or [1, T]; None where the model cannot be traced,
        or gives something else then.
        """
        update = low_rank_of(self._first) if adapt else None
        key = ids.device, adapt, quantized, id(update)
        with self._tracing:
            if key not in self._traced:
                self._updates.append(update)
                self._traced[key] = _traced(self._decoder, ids.device, quantized, adapt)
            step = self._traced[key]
        return None if step is None else _run(step, ids, attend, enter, layers)


def _run(
    step: nn.Module,
    ids: Tensor,
    attend: Attend,
    enter: Enter | None = None,
    layers: int | None = None,
) -> Tensor:
    """As ModelAdapter.hidden. The tokens of a text are rows, to all but the attention."""
    if ids.shape[1] == 1:
        return run_layers(step, ids, ForwardCache(attend), enter=enter)

    def attend_rows(layer: int, *rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 2) for x in rows)
        return attend(layer, q, k, v).transpose(0, 2)

    def enter_rows(layer: int, states: Tensor) -> None:
        if enter is not None:
            enter(layer, states.transpose(0, 1))

    cache = ForwardCache(attend_rows)
    return run_layers(step, ids.T, cache, layers=layers, enter=enter_rows).transpose(0, 1)


def _traced(
    decoder: nn.Module, device: torch.device, quantized: bool, adapt: bool
) -> nn.Module | None:
    """The decoder with traced layers; None where they cannot be traced or give something else than
    the modules.
    """
    ids = torch.arange(1, 1 + _COMPARED, device=device)[None]
    try:
        with torch.no_grad():
            if adapt and device.type != "cpu":
                merge(decoder)
            with taking(False), _unlogged(), adapted(False):
                step = _step_of(decoder, ids[:, :1], quantized, adapt)
            with adapted(adapt):
                return step if _same(decoder, step, ids) else None
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


def _step_of(decoder: nn.Module, ids: Tensor, quantized: bool, adapt: bool) -> nn.Module:
    graphs: dict[object, tuple[Callable[..., Tensor], list[list[str]]]] = {}
    layers = nn.ModuleList()
    calls = called(decoder, ids)
    for number, (layer, call) in enumerate(zip(layers_of(decoder), calls, strict=True)):
        key = alike(layer, call)
        if key not in graphs:
            graphs[key] = layer_graph(layer, call, quantized, adapt)
        forward, together = graphs[key]
        inputs = _inputs(layer, together, quantized, adapt)
        layers.append(_TracedLayer(layer, number, call, forward, inputs))
    step = copy.copy(decoder)
    step._modules = {**decoder._modules, "layers": layers}
    return step


def _same(decoder: nn.Module, step: nn.Module, ids: Tensor) -> bool:
    """Does a step give what the modules give, for an attention that shows every part of it?"""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + (k - 2 * v).repeat_interleave(group, 1) * (1 + layer)

    expected = run_layers(decoder, ids, ForwardCache(attend))
    found = _run(step, ids, attend)
    return difference_beyond_rounding(found, expected, expected.dtype) is None
