"""FAISS over the keys of one KV head: the families there are, how much each looks at, and how much
it must look at.

The only file that imports FAISS, and only where it is used.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from memstore.errors import InvalidInput
from memstore.index.metric import QueryMetric

Family = Literal["flat", "sq8", "ivf", "ivf-sq8", "hnsw"]
FAMILIES: tuple[Family, ...] = ("flat", "sq8", "ivf", "ivf-sq8", "hnsw")

_LISTS = 2.0  # inverted lists for the square root of the keys
_A_LIST = 39  # keys that a list should have at least to be trained (FAISS warns below)
_SAMPLE = 64  # keys a list that k-means sees
_ROUNDS = 8  # of k-means
_LINKS = 32  # neighbours of a key in an HNSW graph
_CANDIDATES = 80  # considered when a key is linked
_PER_EFFORT = 60  # keys that HNSW looks at for each of efSearch
# numbers of keys that could be scored in the time that asking FAISS takes, beside what it looks at
_CALL = 1 << 18


def faiss() -> Any:
    """FAISS with as many threads as torch. Raises InvalidInput, which says how to get it."""
    try:
        import faiss as library
    except ImportError as error:
        raise InvalidInput(
            "this index needs FAISS: pip install 'memstore[cpu]' (or memstore[gpu]), or choose the "
            "packed index"
        ) from error
    library.omp_set_num_threads(torch.get_num_threads())
    return library


def has_faiss() -> bool:
    """Is FAISS installed?"""
    return importlib.util.find_spec("faiss") is not None


@dataclass
class Calibration:
    """How much a search looks at, so that it finds `recall` of the `top_k` best of sampled
    queries.
    """

    effort: int = 1  # nprobe or efSearch; 1 where there is nothing to choose
    top_k: int = 0  # 0: not calibrated
    recall: float = 1.0
    queries: int = 0


class HeadIndex:
    """Approximate candidates among the keys of one KV head, numbered 0, 1, .. in the order in which
    they were added.
    """

    def __init__(
        self,
        family: Family,
        metric: QueryMetric | None,
        index: Any,
        calibration: Calibration | None = None,
    ) -> None:
        """Use `build` or `load`."""
        self.family, self.metric, self.index = family, metric, index
        self.calibration = calibration or Calibration()
        self._centroids: np.ndarray | None = None
        if family.startswith("ivf"):
            lists = int(index.nlist)
            self._centroids = faiss().downcast_index(index.quantizer).reconstruct_n(0, lists)

    @classmethod
    def build(cls, family: Family, keys: np.ndarray, queries: np.ndarray) -> "HeadIndex":
        """Train on keys [n, D] and a sample of queries [m, D] (none: as if they came from
        everywhere), and add the keys.
        """
        library, dim = faiss(), keys.shape[1]
        if family == "flat":
            head = cls(family, None, library.IndexFlatIP(dim))
            head.add(keys)
            return head
        metric = QueryMetric.of(keys, queries)
        if family == "hnsw":
            metric = metric.lengthened(keys)
        moved = metric.keys(keys)
        product = library.METRIC_INNER_PRODUCT
        bits = library.ScalarQuantizer.QT_8bit
        if family == "sq8":
            index = library.IndexScalarQuantizer(dim, bits, product)
            # all of them: a key outside the range seen is cut to it, and the best lie outside
            index.train(moved)
        elif family == "hnsw":
            # links neighbours by distance
            index = library.IndexHNSWFlat(moved.shape[1], _LINKS, library.METRIC_L2)
            index.hnsw.efConstruction = _CANDIDATES
        else:
            index = _inverted_lists(library, moved, family == "ivf-sq8")
        head = cls(family, metric, index)
        head.add(keys)
        return head

    def add(self, keys: np.ndarray) -> None:
        """Add keys [n, D]; nothing is trained again."""
        moved = keys if self.metric is None else self.metric.keys(keys)
        if self._centroids is None:
            self.index.add(np.ascontiguousarray(moved, dtype=np.float32))
            return
        # Lists hold what is near; they are searched by their centroid's product with the query.
        library = faiss()
        ids = np.arange(self.size, self.size + len(moved))
        lists = _nearest(library, moved, self._centroids)
        pointer = library.swig_ptr
        self.index.add_core(len(moved), pointer(moved), pointer(ids), pointer(lists))

    @property
    def size(self) -> int:
        """Keys that were added."""
        return int(self.index.ntotal)

    def search(
        self, queries: np.ndarray, count: int, effort: int, selector: Any = None
    ) -> np.ndarray:
        """The numbers int64 [n, count] of candidates for queries [n, D], -1 where fewer were
        found.
        """
        library = faiss()
        moved = queries if self.metric is None else self.metric.queries(queries)
        found: np.ndarray = self.index.search(
            moved, count, params=self._parameters(library, effort, count, selector)
        )[1]
        return found

    def _parameters(self, library: Any, effort: int, count: int, selector: Any) -> Any:
        if self._centroids is not None:
            return library.SearchParametersIVF(
                sel=selector, nprobe=min(effort, len(self._centroids))
            )
        if self.family == "hnsw":
            return library.SearchParametersHNSW(sel=selector, efSearch=max(effort, count))
        return None if selector is None else library.SearchParameters(sel=selector)

    # How much to look at

    @property
    def efforts(self) -> list[int]:
        """What the effort can be, ascending."""
        if self._centroids is None and self.family != "hnsw":
            return [1]
        most = len(self._centroids) if self._centroids is not None else min(self.size, 4096)
        steps = [base << shift for shift in range(16) for base in (4, 6)]
        return sorted({1, 2, 3, *(step for step in steps if step < most), most})

    def calibrate(
        self,
        queries: np.ndarray,
        best: np.ndarray,
        exact: Callable[[np.ndarray], np.ndarray],
        target: float,
        candidates: int,
    ) -> None:
        """Choose the least effort that finds `target` of the best.

        queries: [m, D]; best: [m, top_k] numbers of their best keys; exact: found [m, candidates]
        -> the top_k of them by exact score. An effort that never suffices ends at the most.
        """
        top_k = best.shape[1]
        for effort in self.efforts:
            found = exact(self.search(queries, candidates, effort))
            recall = float((found[:, :, None] == best[:, None, :]).any(1).mean())
            self.calibration = Calibration(effort, top_k, recall, len(queries))
            if recall >= target:
                return

    def cost(self, rows: float, top_k: int, coverage: float) -> float:
        """Keys that could be scored one row at a time in the time of this search."""
        effort = self.effort(top_k, coverage)
        if self._centroids is not None:
            lists = len(self._centroids)
            looked_at = lists + 1.3 * min(effort, lists) * self.size / lists
        elif self.family == "hnsw":
            looked_at = _PER_EFFORT * effort
        else:
            looked_at = self.size
        return _CALL / int(self.index.d) + rows * looked_at

    def effort(self, top_k: int, coverage: float) -> int:
        """The calibrated effort, more of it for more blocks and where only a share `coverage` of
        the keys is wanted.
        """
        wider = max(1.0, top_k / self.calibration.top_k) if self.calibration.top_k else 1.0
        return int(np.ceil(self.calibration.effort * wider / coverage))

    @property
    def bytes(self) -> int:
        """About what the index takes in memory."""
        dim, n = int(self.index.d), self.size
        a_key = {
            "flat": 4 * dim,
            "sq8": dim,
            "ivf": 4 * dim + 8,
            "ivf-sq8": dim + 8,
            "hnsw": 4 * dim + 8 * _LINKS + 4,
        }
        return n * a_key[self.family] + (0 if self._centroids is None else self._centroids.nbytes)

    # Files

    def dump(self) -> np.ndarray:
        """The FAISS index as bytes, uint8 [n]."""
        stored: np.ndarray = faiss().serialize_index(self.index)
        return stored

    @classmethod
    def load(
        cls,
        family: Family,
        metric: QueryMetric | None,
        calibration: Calibration,
        stored: np.ndarray,
    ) -> "HeadIndex":
        """The inverse of `dump`; the bytes must be known to be whole."""
        return cls(family, metric, faiss().deserialize_index(stored), calibration)


def _inverted_lists(library: Any, keys: np.ndarray, rounded: bool) -> Any:
    """A trained and empty IVF index over keys in their metric: lists by distance, searched by
    product.
    """
    n, dim = keys.shape
    lists = max(1, min(int(_LISTS * n**0.5), n // _A_LIST))
    sample = _some(keys, lists * _SAMPLE)
    means = library.Kmeans(dim, lists, niter=_ROUNDS, seed=1234)
    means.train(sample)
    quantizer = library.IndexFlatIP(dim)
    quantizer.add(means.centroids)
    product = library.METRIC_INNER_PRODUCT
    if rounded:
        index = library.IndexIVFScalarQuantizer(
            quantizer, dim, lists, library.ScalarQuantizer.QT_8bit, product
        )
        nearest = _nearest(library, sample, means.centroids)
        index.train_encoder(len(sample), library.swig_ptr(sample), library.swig_ptr(nearest))
    else:
        index = library.IndexIVFFlat(quantizer, dim, lists, product)
    index.is_trained = True
    index.own_fields = True  # the index frees the quantizer, not Python
    quantizer.this.disown()
    return index


def _nearest(library: Any, keys: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of every key, int64 [n]."""
    return np.ascontiguousarray(library.knn(keys, centroids, 1)[1][:, 0])


def _some(keys: np.ndarray, most: int) -> np.ndarray:
    """At most `most` keys, evenly spread."""
    return np.ascontiguousarray(
        keys if len(keys) <= most else keys[np.linspace(0, len(keys) - 1, most).astype(np.int64)]
    )


def selector(ranges: Sequence[tuple[int, int]], size: int) -> Any:
    """What admits only these of `size` rows; None when that is every row."""
    library = faiss()
    if len(ranges) == 1:
        return None if tuple(ranges[0]) == (0, size) else library.IDSelectorRange(*ranges[0])
    allowed = np.zeros(size, dtype=bool)
    for start, end in ranges:
        allowed[start:end] = True
    return library.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
