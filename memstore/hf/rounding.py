"""Are two ways to compute the same, but for rounding?"""

import torch
from torch import Tensor

# by how much two ways to compute may differ, of the largest number: in float32, in half precision
_TOLERANCE, _ROUGH = 1e-4, 0.05


def apart(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float | None:
    """By how much a model's numbers, computed in a dtype, differ from what was expected; None where
    that is rounding.
    """
    exact = dtype in (torch.float32, torch.float64)
    most = float(expected.abs().max()) * (_TOLERANCE if exact else _ROUGH)
    difference = float((found - expected).abs().max())
    return None if difference <= most else difference
