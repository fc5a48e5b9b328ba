"""FAISS over the keys of one KV head: inverted lists of keys rounded to 8 bits, how much a search
looks at, and how much it must look at.

The only file that imports FAISS, and only where it is used.

An engine that groups or rounds keys by their distance treats every direction alike. Attention's
queries do not: they share a mean and differ along few directions, while the keys of a head share a
mean that no query tells apart. Since q.k = q.m + (C^-1/2 q).(C^1/2 (k - m)), keys may be centred on
their mean m and scaled by the root of the queries' second moment C = E[q q^T] without changing any
ranking; an error e of a key then costs E[(q.e)^2] = |C^1/2 e|^2, its plain squared length.
docs/appendix/index.md has what that is worth.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memstore.decode import Count, Positive, Share
from memstore.errors import InvalidInput, install_extra

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


FAMILY = "ivf-sq8"
_CODE, _CLASS = b"IwSq", "IndexIVFScalarQuantizer"  # as FAISS calls it, in its files and in Python

# candidates a wanted block that an engine proposes, before their exact scores choose
RESCORED = 4

_LISTS = 2.0  # inverted lists for the square root of the keys
_A_LIST = 39  # keys that a list should have at least to be trained (FAISS warns below)
_SAMPLE = 64  # keys a list that k-means sees
_ROUNDS = 8  # of k-means
_CALIBRATED = 256  # queries that the effort is chosen by
# numbers of keys that could be scored in the time that asking FAISS takes, beside what it looks at
_CALL = 1 << 18


def faiss() -> Any:
    """FAISS with as many threads as torch. Raises InvalidInput, which says how to get it."""
    try:
        import faiss as library
    except ImportError as error:
        raise InvalidInput(
            f"this index needs FAISS: {install_extra('cpu')} (with a GPU '.[gpu]'), or "
            "choose the packed index"
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

    effort: Positive = 1  # lists probed
    top_k: Count = 0  # 0: not calibrated
    recall: Share = 1.0
    queries: Count = 0


class HeadIndex:
    """Approximate candidates among the keys of one KV head, numbered 0, 1, .. in the order in which
    they were added.
    """

    def __init__(
        self, metric: QueryMetric, index: Any, calibration: Calibration | None = None
    ) -> None:
        """Use `build` or `load`."""
        self.metric, self.index = metric, index
        self.calibration = calibration or Calibration()
        quantizer = faiss().downcast_index(index.quantizer)
        self._centroids: np.ndarray = quantizer.reconstruct_n(0, int(index.nlist))

    @classmethod
    def build(cls, keys: np.ndarray, queries: np.ndarray) -> "HeadIndex":
        """Train on keys [n, D] and a sample of queries [m, D] (none: as if they came from
        everywhere), and add the keys.
        """
        metric = QueryMetric.of(keys, queries)
        head = cls(metric, inverted_lists(faiss(), metric.keys(keys)))
        head.add(keys)
        return head

    @classmethod
    def calibrated(
        cls, keys: np.ndarray, queries: np.ndarray, top_k: int, recall: float
    ) -> "HeadIndex":
        """Built with half of the queries and calibrated with the others; a few serve for both.

        Without any (a gate that never opened while queries were sampled) nothing tells how little
        would do: then it looks at everything.
        """
        train, held_out = (
            (queries[::2], queries[1::2]) if len(queries) >= 64 else (queries, queries)
        )
        head = cls.build(keys, train)
        if len(held_out):
            head.calibrate(keys, held_out, top_k, recall)
        else:
            head.calibration = Calibration(head.efforts[-1], top_k)
        return head

    def add(self, keys: np.ndarray) -> None:
        """Add keys [n, D]; nothing is trained again."""
        # Lists hold what is near; they are searched by their centroid's product with the query.
        library, moved = faiss(), self.metric.keys(keys)
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
        parameters = faiss().SearchParametersIVF(
            sel=selector, nprobe=min(effort, len(self._centroids))
        )
        found: np.ndarray = self.index.search(
            self.metric.queries(queries), count, params=parameters
        )[1]
        return found

    # How much to look at

    @property
    def efforts(self) -> list[int]:
        """What the effort can be, ascending."""
        most = len(self._centroids)
        steps = [base << shift for shift in range(16) for base in (4, 6)]
        return sorted({1, 2, 3, *(step for step in steps if step < most), most})

    def calibrate(self, keys: np.ndarray, queries: np.ndarray, top_k: int, target: float) -> None:
        """Choose the least effort that finds `target` of the true top_k.

        keys: [n, D], those that were added; queries: [m, D], of which at most 256 are tried. An
        effort that never suffices ends at the most.
        """
        tried = np.linspace(0, len(queries) - 1, min(len(queries), _CALIBRATED)).astype(np.int64)
        some = queries[tried]
        scores = torch.from_numpy(some) @ torch.from_numpy(keys).T  # (m, n)
        best = scores.topk(min(top_k, len(keys)), -1).indices.numpy()
        wanted = best.shape[1]
        for effort in self.efforts:
            ids = torch.from_numpy(self.search(some, RESCORED * wanted, effort))
            of_ids = scores.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
            chosen = ids.gather(-1, of_ids.topk(wanted, -1).indices).numpy()
            recall = float((chosen[:, :, None] == best[:, None, :]).any(1).mean())
            self.calibration = Calibration(effort, wanted, recall, len(some))
            if recall >= target:
                return

    def cost(self, rows: float, top_k: int, coverage: float) -> float:
        """Keys that could be scored one row at a time in the time of this search."""
        lists = len(self._centroids)
        probed = min(self.effort(top_k, coverage), lists)
        return _CALL / int(self.index.d) + rows * (lists + 1.3 * probed * self.size / lists)

    def effort(self, top_k: int, coverage: float) -> int:
        """The calibrated effort, more of it for more blocks and where only a share `coverage` of
        the keys is wanted.
        """
        wider = max(1.0, top_k / self.calibration.top_k) if self.calibration.top_k else 1.0
        return int(np.ceil(self.calibration.effort * wider / coverage))

    @property
    def bytes(self) -> int:
        """About what the index takes in memory."""
        return int(self.size * (int(self.index.d) + 8) + self._centroids.nbytes)

    # Files

    def dump(self) -> np.ndarray:
        """The FAISS index as bytes, uint8 [n]."""
        stored: np.ndarray = faiss().serialize_index(self.index)
        return stored

    @classmethod
    def load(cls, metric: QueryMetric, calibration: Calibration, stored: np.ndarray) -> "HeadIndex":
        """The inverse of `dump`; the bytes must be known to be whole. Raises what FAISS raises, and
        ValueError for an index of another kind: some kinds open files.
        """
        if stored[:4].tobytes() != _CODE or b"ilod" in stored.tobytes():
            raise ValueError("no inverted lists in memory")
        return cls(metric, faiss().deserialize_index(stored), calibration)

    def check(self, dim: int, size: int) -> None:
        """Is it what `dump` was taken of, keys of `dim` numbers in rows 0 .. size - 1? Raises
        ValueError.
        """
        library, index = faiss(), self.index
        lists = library.downcast_InvertedLists(index.invlists)
        right = (
            type(index).__name__ == _CLASS
            and isinstance(lists, library.ArrayInvertedLists)
            and int(index.d) == dim == self._centroids.shape[1]
            and int(index.ntotal) == size
            and int(index.nlist) == lists.nlist == len(self._centroids) >= 1
            and index.code_size == lists.code_size
            and np.isfinite(self._centroids).all()
        )
        if not right:
            raise ValueError("its inverted lists are not of these keys")
        ids = [
            library.rev_swig_ptr(lists.get_ids(number), lists.list_size(number)).copy()
            for number in range(lists.nlist)
            if lists.list_size(number)
        ]
        if not np.array_equal(np.sort(np.concatenate(ids)), np.arange(size)):
            raise ValueError("its rows are not each there once")


def inverted_lists(library: Any, keys: np.ndarray) -> Any:
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
    index = library.IndexIVFScalarQuantizer(
        quantizer, dim, lists, library.ScalarQuantizer.QT_8bit, product
    )
    nearest = _nearest(library, sample, means.centroids)
    index.train_encoder(len(sample), library.swig_ptr(sample), library.swig_ptr(nearest))
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
