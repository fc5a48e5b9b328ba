"""Coordinates in which an approximate engine's errors cost what they cost the queries.

An engine that groups or rounds keys by their distance treats every direction alike. Attention's
queries do not: they share a mean and differ along few directions, while the keys of a head share a
mean that no query tells apart. Since q.k = q.m + (C^-1/2 q).(C^1/2 (k - m)), keys may be centred on
their mean m and scaled by the root of the queries' second moment C = E[q q^T] without changing any
ranking; an error e of a key then costs E[(q.e)^2] = |C^1/2 e|^2, its plain squared length.
docs/appendix/index.md has what that is worth.
"""

from dataclasses import dataclass

import numpy as np

_FLOOR = 1e-3  # of the mean eigenvalue: no direction counts less


@dataclass(frozen=True)
class QueryMetric:
    """A change of coordinates of keys and queries that keeps the order of every query's inner
    products.

    mean: [D]; of_keys, of_queries: [D, D], inverse to each other; all float32.
    """

    mean: np.ndarray
    of_keys: np.ndarray
    of_queries: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, queries: np.ndarray) -> "QueryMetric":
        """For keys [n, D] and a sample of queries [m, D]; of few queries the metric is less sure,
        and flatter.
        """
        dim = keys.shape[1]
        moment = np.eye(dim)
        if len(queries):
            seen = queries.astype(np.float64)
            moment = seen.T @ seen / len(seen)
            moment += max(_FLOOR, 1 / len(seen)) * np.trace(moment) / dim * np.eye(dim)
            moment /= np.trace(moment) / dim
        values, vectors = np.linalg.eigh(moment)
        roots = np.sqrt(values)
        return cls(
            keys.mean(0, dtype=np.float64).astype(np.float32),
            ((vectors * roots) @ vectors.T).astype(np.float32),
            ((vectors / roots) @ vectors.T).astype(np.float32),
        )

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Keys [n, D] in these coordinates."""
        return np.ascontiguousarray((keys - self.mean) @ self.of_keys, dtype=np.float32)

    def queries(self, queries: np.ndarray) -> np.ndarray:
        """Queries [n, D] in these coordinates; each loses a constant of its own, its product with
        the mean.
        """
        return np.ascontiguousarray(queries @ self.of_queries, dtype=np.float32)
