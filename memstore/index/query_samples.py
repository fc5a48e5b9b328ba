"""Queries of searches that were made, kept to train and calibrate engines with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from memstore.index.packed import Lookup

_MOST = 2048  # queries of a head that are kept


class QuerySamples:
    """The queries of an index. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampling = False
        # (layer, KV head) -> queries [n, D]
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Keep the queries of the searches made meanwhile, in place of those from before."""
        with self._lock:
            self._kept, self._sampling = {}, True
        try:
            yield
        finally:
            self._sampling = False

    @property
    def kept(self) -> dict[tuple[int, int], np.ndarray]:
        """The queries float32 [n, D] kept for a (layer, KV head)."""
        with self._lock:
            return {
                key: torch.cat(queries).float().cpu().numpy() for key, queries in self._kept.items()
            }

    @kept.setter
    def kept(self, queries: dict[tuple[int, int], np.ndarray]) -> None:
        with self._lock:
            self._kept = {
                key: [torch.from_numpy(np.ascontiguousarray(x))] for key, x in queries.items()
            }

    def add(self, lookup: Lookup, kv_heads: int) -> None:
        """A search is made: keep some of its queries, where they are wanted."""
        if not self._sampling:
            return
        grouped = lookup.q.detach().unflatten(0, (kv_heads, -1))
        opened = lookup.open_rows
        opened = None if opened is None else opened.unflatten(0, (kv_heads, -1))
        with self._lock:
            for head, queries in enumerate(grouped):
                some = queries.flatten(0, 1) if opened is None else queries[opened[head]]
                kept = self._kept.get((lookup.layer, head), [])
                if len(some) and sum(map(len, kept)) < _MOST:
                    self._kept[lookup.layer, head] = [*kept, some.clone()]
