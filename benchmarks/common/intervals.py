"""Confidence intervals of what was measured."""

import math
from collections.abc import Hashable, Sequence

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


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of paired differences in -1..1 between right and wrong answers.

    It is Wald's interval of these and two more pairs, one for either side, which covers 95% for few
    pairs too (Bonett & Price 2012).
    """
    x = np.array([*differences, 1.0, -1.0])
    half = Z95 * float(x.std()) / math.sqrt(len(x))
    return max(-1.0, float(x.mean()) - half), min(1.0, float(x.mean()) + half)


_FEW = (12.7062, 4.3027, 3.1824, 2.7764)  # of 1 to 4 degrees of freedom


def _students_t(degrees: int) -> float:
    """The 97.5% quantile; of more than four degrees by the first terms of its expansion around the
    normal one (Abramowitz & Stegun 26.7.5), to .003.
    """
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**n for n, term in enumerate(terms, 1))


def clustered_interval(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]
) -> tuple[float, float, float]:
    """Mean and its 95% interval, of values that are independent only between clusters (the
    linearised ratio estimator, Cochran 1977, with Student's t).
    """
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    totals: dict[Hashable, float] = {}
    for cluster, value in zip(clusters, x):
        totals[cluster] = totals.get(cluster, 0.0) + value - mean
    n = len(totals)
    if n < 2:
        return mean, -math.inf, math.inf
    squares = sum(total**2 for total in totals.values())
    half = _students_t(n - 1) * math.sqrt(n / (n - 1) * squares) / len(x)
    return mean, mean - half, mean + half


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t, of independent values."""
    return clustered_interval(values, range(len(values)))


def perplexity_ratio(losses: np.ndarray, against: np.ndarray | float) -> tuple[float, float, float]:
    """The ratio of two perplexities of the same tokens and its 95% interval, by paired mean losses
    [n] of texts.
    """
    middle, low, high = (math.exp(x) for x in mean_interval(losses - against))
    return middle, low, high
