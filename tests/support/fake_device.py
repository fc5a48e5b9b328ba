"""A device that is not there: tensors on it compute on the CPU, and whatever mixes the two fails as
it would on CUDA.

Inside `with FakeDevice():` tensors made with device="cuda" are marked, and so is what is computed
from them. What CUDA lets pass does here too: scalars, copies, and indices on the CPU.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HERE, THERE = torch.device("cpu"), torch.device("cuda", 0)
_GET_DEVICE, _SET_DATA = Tensor.device.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_COPY = (Tensor.copy_, _SET_DATA)
_EITHER = (*_COPY, Tensor.to, Tensor.cpu, torch._has_compatible_shallow_copy_type)
_INDEX = (Tensor.__getitem__, Tensor.__setitem__)


class FakeDevice(TorchFunctionMode):
    """See the module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DEVICE:
            return THERE if _marked(args[0]) else HERE
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return False  # no Triton here
        kwargs = dict(kwargs or {})
        given = [*_leaves((args, kwargs))]
        tensors = [x for x in given if isinstance(x, Tensor)]
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        target = self._target(func, args, kwargs)
        if func not in _EITHER:
            self._check(func, args, tensors)
        if func in (Tensor.numpy, Tensor.__array__):
            assert not _marked(args[0]), "numpy() of a tensor that is not on the CPU"
        if any(map(_is_there, given)):
            args, kwargs = tree_map(lambda x: HERE if _is_there(x) else x, (list(args), kwargs))
        result = func(*args, **kwargs)
        marked = (
            any(map(_marked, tensors[:1] if func in _COPY else tensors))
            if target is None
            else target == THERE
        )
        if func == _SET_DATA:
            args[0].elsewhere = _marked(args[1])
        if target is not None and result is not None and any(result is x for x in tensors):
            # a "copy" has a mark of its own
            result = result.view_as(result) if _marked(result) != marked else result
        for x in _leaves(result):
            if isinstance(x, Tensor):
                x.elsewhere = marked  # type: ignore[attr-defined]
        return result

    def _target(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """The device that is asked for, if one is."""
        if func == Tensor.cpu:
            return HERE
        named = kwargs.get("device")
        if func == Tensor.to and named is None:
            named = next((x for x in args[1:] if isinstance(x, (torch.device, str))), None)
            other = next((x for x in args[1:] if isinstance(x, Tensor)), None)
            named = named if other is None else (THERE if _marked(other) else HERE)
        return (
            None if named is None else torch.device(named) if torch.device(named) == HERE else THERE
        )

    def _check(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        if func in _INDEX:
            into, index, *values = args
            indices = [x for x in _leaves(index) if isinstance(x, Tensor)]
            assert _marked(into) or not any(map(_marked, indices)), (
                "a CPU tensor indexed by one that is not"
            )
            # without an index tensor it is a view, or a copy into one
            tensors = [into, *values] if indices else []
        places = {_marked(x) for x in tensors if isinstance(x, Tensor) and x.dim()}
        assert len(places) < 2, f"{getattr(func, '__name__', func)} mixes tensors of two devices"


def _leaves(x: Any) -> Iterator[Any]:
    """As torch.utils._pytree.tree_iter, which asks more of everything."""
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _leaves(part)
    elif isinstance(x, dict):
        for part in x.values():
            yield from _leaves(part)
    else:
        yield x


def _is_there(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == THERE.type
    return isinstance(x, str) and x in ("cuda", "cuda:0")


def _marked(x: Tensor) -> bool:
    return getattr(x, "elsewhere", False)
