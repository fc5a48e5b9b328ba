"""Confidence intervals of what was measured."""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959964


def wilson(right: int, trials: int) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    p, z2 = right / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t (normal beyond 100 values)."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return float(x.mean()), -math.inf, math.inf
    # first terms of the expansion of t in 1 / degrees of freedom
    t = Z95 * (1 + (Z95 * Z95 + 1) / (4 * (len(x) - 1)))
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half
