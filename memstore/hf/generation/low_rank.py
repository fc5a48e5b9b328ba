"""Low-rank adapters (LoRA) of linear layers, switched on and off per thread and per row."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_active = threading.local()  # .now: rows of this thread's forward pass that use the adapter


@dataclass(frozen=True)
class LowRank:
    """The update scale * b @ a @ x of a linear layer; a is [rank, in_features], b is
    [out_features, rank], in any dtype.
    """

    a: Tensor
    b: Tensor
    scale: float

    def added(self, product: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Add the update to product [.., out_features] of x [.., in_features]. rows: [.., 1], 1 for
        rows that get the update and 0 for the others; None for all.
        """
        narrow = linear(x, self.a.to(x.dtype))
        if rows is not None:
            narrow = narrow * rows
        flat = narrow.reshape(-1, len(self.a))
        whole = product.reshape(-1, len(self.b))
        return torch.addmm(whole, flat, self.b.T.to(x.dtype), alpha=self.scale).view(product.shape)

    @staticmethod
    def joined(parts: Sequence["LowRank"]) -> "LowRank":
        """The updates of layers with the same input, concatenated by output features."""
        a = torch.cat([one.a for one in parts])
        return LowRank(a, torch.block_diag(*(one.b for one in parts)), parts[0].scale)


@contextmanager
def adapted(rows: bool | Tensor = True) -> Iterator[None]:
    """Context in which this thread's forward passes use the model's adapter for all rows, for none,
    or for those rows of a [.., T, 1] tensor that are 1.
    """
    before, _active.now = getattr(_active, "now", False), rows
    try:
        yield
    finally:
        _active.now = before


def set_low_rank(layer: nn.Module, low_rank: LowRank) -> None:
    """Give a linear layer an update, which it adds within `adapted`; it replaces an earlier one."""
    if low_rank_of(layer) is None:
        layer.register_forward_hook(_add)
    layer.__dict__["low_rank"] = low_rank  # not a module: it must not enter the model's state dict


def low_rank_of(layer: nn.Module) -> LowRank | None:
    return cast(LowRank | None, layer.__dict__.get("low_rank"))


def _add(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    rows, low_rank = getattr(_active, "now", False), low_rank_of(layer)
    if rows is False or low_rank is None:
        return None
    return low_rank.added(output, args[0], None if rows is True else rows)
