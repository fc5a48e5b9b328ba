"""Decode with flat graphs of a decoder's layers: the operations of a layer's modules, without the
modules, their hooks, and the rotation (by zero when the caller computes attention).

Python between operations takes a third of the time of a generated token in a decoder of 30 layers,
and most of a question's on a GPU. torch.fx traces the model's own code with fake tensors. Code that
depends on values, such as a router's choice of experts, cannot be traced; then the modules run.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm
from torch.utils import _pytree as pytree

from memstore.hf.attention_seam import ForwardCache, active, difference_beyond_rounding, run_layers
from memstore.hf.quantized_weights import Multiply, Taken, join, multiply, products
from memstore.hf.reading_adapter import LowRank, low_rank_of
from memstore.model.adapter import Attend

_aten = torch.ops.aten
_ROWS = 1009  # that a layer is traced with: no other size in it is the same


# Graphs


def traced(function: Callable[..., Tensor], *args: Any) -> fx.GraphModule:
    """Trace a function that returns one tensor; `compiled` makes its graph callable."""
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
    """Replace products by slices of one product with a new last input. rows: of each slice."""
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
    """Remove multiplications by one and additions of zero."""
    known: dict[fx.Node, Tensor] = {}  # constants: the same in every call
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif node.target in _RESHAPES and node.args[0] in known:
            known[node] = node.target(known[node.args[0]], *node.args[1:], **node.kwargs)
        elif node.target is _aten.mul.Tensor and node.args[1] in known:
            x, factor = node.args[0], known[node.args[1]]
            if bool((factor == 1).all()) and _same_shape_and_dtype(node, x):
                node.replace_all_uses_with(x)
            elif not factor.any():
                known[node] = torch.zeros((), dtype=factor.dtype)
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
    """The arguments with which a decoder called one of its layers, and the output."""

    states: Tensor
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any


def called(decoder: nn.Module, ids: Tensor) -> list[Call]:
    """Run ids through a decoder, and return the call of every layer."""
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
    """A key that is equal for layers that compute the same with other weights."""
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


def _joined(layer: nn.Module, names: Iterable[str], taken: Taken) -> Multiply | None:
    return join([layer.get_submodule(name.removesuffix(".weight")) for name in names], taken)


def _inputs(layer: nn.Module, together: Sequence[Sequence[str]], taken: Taken) -> list[Any]:
    """The tensors and products of a layer that its graph takes as inputs."""
    joined = [_joined(layer, names, taken) for names in together]
    values, few = dict[str, Any](_values(layer)), dict[str, Any](products(layer, taken))
    if taken.merged:  # what is joined is not taken alone
        few = {name: _joined(layer, [name], taken) for name in few if name not in chain(*together)}
    return [*(values | few).values(), *joined]


def layer_graph(
    layer: nn.Module, call: Call, taken: Taken
) -> tuple[Callable[..., Tensor], list[list[str]]]:
    """Trace a layer: (attend, layer_idx, states, *inputs) -> states; and the groups of names of
    weights whose products are joined into one.
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
    few = products(layer, taken)
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
        if len(of) > 1 and _joined(layer, of, taken) is not None:
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
    """Replace the constant _ROWS by the number of rows of the states."""
    *_, last = inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(last):
        rows = graph.call_method("size", (inputs[2], 0))
    for node in graph.nodes:
        if node is not rows:
            node.args = fx.node.map_aggregate(node.args, lambda x: rows if x == _ROWS else x)


def _has_norms(device: torch.device) -> bool:
    """Whether a device has RMS norm as one operation."""
    return device.type != "cpu"


def _twin(layer: nn.Module) -> nn.Module:
    """A copy of a layer's modules that shares its weights. Tracing replaces the copy's weights by
    fake tensors, which other threads that run the layer must not see.
    """
    twin = copy.copy(layer)
    twin._parameters, twin._buffers = dict(layer._parameters), dict(layer._buffers)
    twin._modules = {name: part and _twin(part) for name, part in layer._modules.items()}
    return twin


def fuse_norms(layer: nn.Module) -> None:
    """Make each RMS norm of a layer one operation, which rounds once instead of twice."""
    norms: list[Any] = [part for part in layer.modules() if _is_rms_norm(part)]
    for norm in norms:
        norm.forward = partial(_rms_norm, norm)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return rms_norm(x, norm.weight.shape, norm.weight, eps)


def _is_rms_norm(part: Any) -> bool:
    """Whether a module computes the same as `_rms_norm`."""
    if "RMSNorm" not in type(part).__name__ or len(list(part.parameters())) != 1:
        return False
    weight = part.weight
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device, dtype=weight.dtype)
    x = x.view(3, -1)
    return difference_beyond_rounding(_rms_norm(part, x), part(x), weight.dtype) is None


class _TracedLayer(nn.Module):
    """Runs the graph of a layer in place of the layer."""

    def __init__(
        self,
        layer: nn.Module,
        number: int,
        call: Call,
        forward: Callable[..., Tensor],
        inputs: Sequence[Any],
    ) -> None:
        """forward: the layer's graph; inputs: its last arguments, from `_inputs`."""
        super().__init__()
        self._of = (layer, number, call, forward, inputs)  # a tuple: no part of this module

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """States that enter the layer -> what the layer returns."""
        _, number, call, forward, inputs = self._of
        cache = next(one for one in (*args, *named.values()) if isinstance(one, ForwardCache))
        cache.begin_layer(number, hidden_states)
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
    """Forward passes over traced layers, of one token for each of B rows or the tokens of one text.

    Passes with the adapter multiply by copies of the weights with the updates merged, if a quarter
    of a GPU's free memory holds these copies. They are freed with the graphs.
    """

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: attached (memstore.hf.attention_seam)."""
        self._decoder = decoder
        self._first = next((x for x in decoder.modules() if isinstance(x, nn.Linear)), decoder)
        self._tracing = threading.Lock()
        # with the update of the first linear layer then: another adapter is another graph
        self._traced: dict[object, tuple[LowRank | None, nn.Module | None]] = {}

    def __call__(self, ids: Tensor, cache: ForwardCache) -> Tensor | None:
        """As run_layers, for ids [B, 1] or [1, T]; None if the model cannot be traced, or its
        graphs give other results.
        """
        update = low_rank_of(self._first) if cache.adapt else None
        key = ids.device, bool(cache.adapt), cache.quantized
        with self._tracing:
            if key not in self._traced or self._traced[key][0] is not update:
                self._traced.pop(key, None)  # copies of weights go before others are made
                self._traced[key] = update, _traced(self._decoder, *key)
            step = self._traced[key][1]
        return None if step is None else _run(step, ids, cache)


def _run(step: nn.Module, ids: Tensor, cache: ForwardCache) -> Tensor:
    """As run_layers. The tokens of a text are rows, except in attention."""
    if ids.shape[1] == 1:
        return run_layers(step, ids, cache)
    attend, enter = cache.attend, cache.enter

    def attend_rows(layer: int, *rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 2) for x in rows)
        return attend(layer, q, k, v).transpose(0, 2)

    cache.attend = attend_rows
    if enter is not None:
        cache.enter = lambda layer, states: enter(layer, states.transpose(0, 1))
    return run_layers(step, ids.T, cache).transpose(0, 1)


def _traced(
    decoder: nn.Module, device: torch.device, adapt: bool, quantized: bool
) -> nn.Module | None:
    """The decoder with traced layers; None if they cannot be traced, or give other results than the
    modules.
    """
    ids = torch.arange(1, 1 + _COMPARED, device=device)[None]
    try:
        with torch.no_grad():
            taken = Taken(quantized, adapt, adapt and _can_merge(decoder, device))
            with _unlogged():
                step = _step_of(decoder, ids[:, :1], taken)
            return step if _same(decoder, step, ids, taken) else None
    except Exception:  # whatever a model's own code does under fake tensors
        _log.debug("%s goes through its modules", type(decoder).__name__, exc_info=True)
        return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log of operations that it cannot trace: the modules then compute them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _can_merge(decoder: nn.Module, device: torch.device) -> bool:
    """Whether a quarter of a GPU's free memory holds copies of all weights that have an update.
    Updates in training are not merged, because they change.
    """
    updated = [one for one in decoder.modules() if low_rank_of(one) is not None]
    trained = any(cast(LowRank, low_rank_of(one)).a.requires_grad for one in updated)
    size = sum(cast(Tensor, one.weight).nbytes for one in updated)
    return not trained and 0 < size <= _free_bytes(device) // 4


def _free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _step_of(decoder: nn.Module, ids: Tensor, taken: Taken) -> nn.Module:
    graphs: dict[object, tuple[Callable[..., Tensor], list[list[str]]]] = {}
    layers = nn.ModuleList()
    calls = called(decoder, ids)
    for number, (layer, call) in enumerate(zip(layers_of(decoder), calls, strict=True)):
        key = alike(layer, call)
        if key not in graphs:
            graphs[key] = layer_graph(layer, call, taken)
        forward, together = graphs[key]
        inputs = _inputs(layer, together, taken)
        layers.append(_TracedLayer(layer, number, call, forward, inputs))
    step = copy.copy(decoder)
    step._modules = {**decoder._modules, "layers": layers}
    return step


def _same(decoder: nn.Module, step: nn.Module, ids: Tensor, taken: Taken) -> bool:
    """Whether a step and the modules give the same, with an attention that uses q, k and v."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return q + (k - 2 * v).repeat_interleave(group, 1) * (1 + layer)

    cache = partial(ForwardCache, attend, adapt=taken.adapt, quantized=taken.quantized)
    expected = run_layers(decoder, ids, cache())
    found = _run(step, ids, cache())
    return difference_beyond_rounding(found, expected, expected.dtype) is None
