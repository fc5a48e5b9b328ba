"""Comparing two computations of the same numbers, made in other batches or by another kernel."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memstore.kernels.reference import NEG

TINY_MODEL = 8
"""Products in a row, in the layers of the models that tests make: what one adds to the stream, the
next ones read."""

_FULL = 32  # units in the last place of the largest number, of float32 and float64
_HALF = 2  # of float16 and bfloat16


def rounding(dtype: torch.dtype, products: int = 1) -> float:
    """By how much numbers may differ, as a share of the largest one, that `products` matrix
    products in a row made in another order.

    A sum of n products has an error of about sqrt(n) units in the last place, and n is at most
    some 1,000 in tests: 32 units. In half precision sums are accumulated in float32 and rounded
    once: one unit either way.
    """
    units = _HALF if dtype.itemsize == 2 else _FULL
    return products * units * torch.finfo(dtype).eps


def assert_same_to_rounding(
    found: "Tensor | np.ndarray | Sequence[float]",
    expected: "Tensor | np.ndarray | Sequence[float]",
    *,
    products: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """The same shapes and dtypes, and the same numbers to rounding. products: see `rounding`;
    dtype: that these were computed in, where the numbers are stored in another. Whole numbers, such
    as int8 landmarks, are rounded from such numbers: a step either way.
    """
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    atol = 1.0
    if expected.dtype.is_floating_point:
        share = rounding(expected.dtype, products if dtype is None else 1)
        if dtype is not None:
            share = max(share, rounding(dtype, products))
        numbers = expected[expected > NEG]  # what is masked is no number, and equal
        atol = share * float(numbers.abs().max()) if numbers.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
