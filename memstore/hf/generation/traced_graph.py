"""A function of tensors as a graph (torch.fx): traced, changed, and compiled to a function of plain
inputs; traced_step.py makes one of a decoder's layer.
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
    """What a function of tensors computes, as a graph that is changed and compiled to a function of
    plain inputs.
    """

    def __init__(self, function: Callable[..., Tensor], *given: Any) -> None:
        made = make_fx(
            function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*given)
        self._module, self._graph = made, made.graph
        self._graph.set_codegen(fx.graph.CodeGen())
        self.inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        (result,) = pytree.tree_leaves(output.args)
        output.args = (result,)

    def input(self, name: str) -> fx.Node:
        """One more input, before those that there were and behind those that were added."""
        with self._graph.inserting_before(self.inputs[0]):
            return self._graph.placeholder(name)

    def call(self, op: object, function: Callable[..., Any], first: tuple[fx.Node, ...]) -> None:
        """Call a function in the place of an operation, with these arguments in front."""
        for node in self._graph.nodes:
            if node.target is op:
                node.target, node.args = function, (*first, *node.args)

    def multiply_by(self, weights: Container[fx.Node]) -> None:
        """These inputs are no weights but what multiplies by them."""
        for node in self._graph.nodes:
            if node.target is _aten.linear.default and node.args[1] in weights:
                x, few, *bias = node.args
                node.target, node.args = multiply, (few, x, *bias)

    def fuse_norms(self) -> None:
        """One operation in the place of the seven or eight of an RMS norm, which a GPU has as one;
        it rounds once, where they round twice.
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

    def products(self) -> Iterable[list[fx.Node]]:
        """Products by quantized weights, those of one factor together."""
        of: dict[Any, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.target is multiply:
                of.setdefault(node.args[1], []).append(node)
        return of.values()

    def join(self, nodes: Sequence[fx.Node], rows: Sequence[int]) -> None:
        """One product in the place of several, by one more input, the last one; rows: of each."""
        last = next(n for n in reversed(self._graph.nodes) if n.op == "placeholder")
        with self._graph.inserting_after(last):
            whole = self._graph.placeholder(f"joined_{nodes[0].name}")
        with self._graph.inserting_before(nodes[0]):
            product = self._graph.call_function(multiply, (whole, nodes[0].args[1]))
        start = 0
        for node, count in zip(nodes, rows, strict=True):
            node.target, node.args = _part, (product, start, count, *node.args[2:])
            start += count

    def compiled(self) -> Callable[..., Tensor]:
        """The function, without what turns nothing."""
        _fold(self._module)
        self._graph.eliminate_dead_code()
        for node in self._graph.nodes:
            if node.target in _METHODS:
                node.op, node.target = "call_method", _METHODS[node.target]
        self._graph.lint()
        self._module.recompile()
        return cast(Callable[..., Tensor], self._module.forward)


class _Norm(NamedTuple):
    """An RMS norm: of x, times a weight, its last operation."""

    x: fx.Node
    weight: fx.Node
    eps: float
    end: fx.Node


def _norm_at(root: Any) -> _Norm | None:
    """The norm whose inverse root this is, where it is made of nothing else."""
    shifted = _made_by(root.args[0], _aten.add.Tensor)
    mean = shifted and _made_by(shifted.args[0], _aten.mean.dim)
    square = mean and _made_by(mean.args[0], _aten.pow.Tensor_Scalar)
    if not (square and square.args[1] == 2 and mean.args[1] == [-1] and len(root.users) == 1):
        return None
    wide, eps = square.args[0], shifted.args[1]
    before = _made_by(wide, _aten.to.dtype)
    x = before.args[0] if before else wide
    (product,) = root.users
    if product.target is not _aten.mul.Tensor or set(product.args) != {wide, root}:
        return None
    of = x.meta["val"]
    if len(product.users) == 1:
        (rounded,) = product.users
        if rounded.target is _aten.to.dtype and rounded.meta["val"].dtype == of.dtype:
            product = rounded
    if len(product.users) != 1:
        return None
    (end,) = product.users
    others = [arg for arg in end.args if isinstance(arg, fx.Node) and arg is not product]
    if end.target is not _aten.mul.Tensor or len(others) != 1 or not isinstance(eps, float):
        return None
    weight = others[0].meta["val"]
    same = (weight.shape, weight.dtype) == (of.shape[-1:], of.dtype) and (
        end.meta["val"].dtype == of.dtype
    )
    return _Norm(x, others[0], eps, end) if same and others[0].op == "placeholder" else None


def _made_by(node: Any, op: object) -> Any:
    """The node, if this operation makes it."""
    return node if isinstance(node, fx.Node) and node.target is op else None


def _fold(module: fx.GraphModule) -> None:
    """Leave out products with ones, and sums with products with zeros."""
    known: dict[fx.Node, Tensor] = {}  # what is the same in every call
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif node.target in _RESHAPES and node.args[0] in known:
            known[node] = node.target(known[node.args[0]], *node.args[1:], **node.kwargs)
        elif node.target is _aten.mul.Tensor and node.args[1] in known:
            _fold_product(node, known)
        elif node.target is _aten.add.Tensor and node.args[1] in known:
            nothing = not known[node.args[1]].any()
            if nothing and _equal_form(node, node.args[0]):
                node.replace_all_uses_with(node.args[0])


# what a tensor's method does in half the time that the call of an operation by its name takes
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
    if bool((factor == 1).all()) and _equal_form(node, x):
        node.replace_all_uses_with(cast(fx.Node, x))
    elif not factor.any():
        known[node] = torch.zeros((), dtype=factor.dtype)


def _equal_form(node: fx.Node, other: Any) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return (one.shape, one.dtype) == (two.shape, two.dtype)


def _part(product: Tensor, start: int, rows: int, bias: Tensor | None = None) -> Tensor:
    part = product.narrow(-1, start, rows)
    return part if bias is None else part + bias
