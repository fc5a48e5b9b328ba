"""Trace a function of tensors to a torch.fx graph, optimize the graph, and compile it.
traced_step.py does so for each layer of a decoder.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm
from torch.utils import _pytree as pytree

from memstore.hf.generation.quantized_weights import multiply

_aten = torch.ops.aten


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
