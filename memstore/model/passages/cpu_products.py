"""Matrix products of many rows on a CPU, by the library that is fastest at them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


def fast_products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """While it is entered, on this thread, linear layers of a model on this device compute their
    products so; nothing is kept for it, and no gradients go through.
    """
    one_dnn = torch.backends.mkldnn.is_available()
    return (
        _OneDnn() if one_dnn and (device.type, dtype) == ("cpu", torch.float32) else nullcontext()
    )


class _OneDnn(TorchFunctionMode):
    """Products of float32 by oneDNN, which uses the widest vectors of any CPU; MKL, which torch
    takes for them, of Intel's alone. In half precision torch takes oneDNN by itself.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is linear and len(args) > 1 and _plain(args[0]) and _plain(args[1]):
            return linear(args[0].to_mkldnn(), *args[1:], **(kwargs or {})).to_dense()
        return func(*args, **(kwargs or {}))


def _plain(x: torch.Tensor) -> bool:
    """Is this a float32 tensor of the CPU, of no class of its own?"""
    known = type(x) in (torch.Tensor, nn.Parameter)
    return (
        known and x.layout is torch.strided and (x.device.type, x.dtype) == ("cpu", torch.float32)
    )
