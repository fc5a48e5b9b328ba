"""Approximate search among the landmark keys of one layer: for each KV head, FAISS's inverted lists
of keys rounded to 8 bits, and the number of lists that a search must probe.

FAISS groups and rounds keys by their distance, which treats every direction alike. Attention's
queries do not: they share a mean and differ along few directions, while the keys of a head share a
mean that no query distinguishes. Since q.k = q.m + (C^-1/2 q).(C^1/2 (k - m)), keys may be centred
on their mean m and scaled by the root of the queries' second moment C = E[q q^T] without changing
any ranking; an error e of a key then costs E[(q.e)^2] = |C^1/2 e|^2, its plain squared length.
docs/appendix/index.md has the gain.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from memstore.decode import Positive, Share
from memstore.errors import InvalidInput, install_extra
from memstore.index.block_rows import Ranges, Remembered, Scope
from memstore.index.index_file import Parts, arrays_of, empty_lists, faiss, floats, index_of

RECALL = 0.95  # share of the true top blocks that an engine is calibrated to find
RESCORED = 4  # candidates a wanted block that an engine proposes, before their exact scores choose

_FLOOR = 1e-3  # of the mean eigenvalue: no direction counts less
_LISTS = 2.0  # inverted lists for the square root of the keys
_A_LIST = 39  # keys that a list should have at least to be trained (FAISS warns below)
_SAMPLE = 64  # keys a list that k-means sees
_ROUNDS = 8  # of k-means
_CALIBRATED = 256  # queries that the effort is chosen by
_MOST_ON_GPU = 2048  # lists probed, and candidates returned, of a search there

_gpu = threading.Lock()  # FAISS's resources of a GPU are for one thread at a time


@dataclass(frozen=True)
class QueryMetric:
    """Coordinates of keys and queries that keep the order of every query's inner products.

    mean: [D]; of_keys, of_queries: [D, D], inverse to each other; all float32.
    """

    mean: np.ndarray
    of_keys: np.ndarray
    of_queries: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, queries: np.ndarray) -> "QueryMetric":
        """The metric for keys [n, D] and a sample of queries [m, D]; the fewer queries, the closer
        it is to the plain metric.
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


@dataclass
class HeadEngine:
    """The keys of one KV head, numbered 0, 1, .., in inverted lists."""

    metric: QueryMetric
    index: Any  # FAISS's
    effort: int = 1  # lists that are probed to find `recall` of the best
    recall: float = 1.0
    on_gpu: Any = None  # a copy of index, once it was searched there

    @classmethod
    def build(cls, keys: np.ndarray, queries: np.ndarray, top_k: int) -> "HeadEngine":
        """Train with half of the queries [m, D] and calibrate with the others; a few queries serve
        for both. Without queries all lists are probed.

        keys: [n, D] float32. Raises InvalidInput if FAISS is missing.
        """
        train, tried = (queries[::2], queries[1::2]) if len(queries) >= 64 else (queries, queries)
        metric = QueryMetric.of(keys, train)
        head = cls(metric, _trained(np.ascontiguousarray((keys - metric.mean) @ metric.of_keys)))
        head.effort = head.index.nlist
        if len(tried):
            head._calibrate(keys, _some(tried, _CALIBRATED), min(top_k, len(keys)))
        return head

    def search(
        self,
        queries: np.ndarray,
        count: int,
        effort: int,
        selector: Any = None,
        device: torch.device | None = None,
    ) -> np.ndarray:
        """Numbers int64 [n, count] of the candidates for queries [n, D], -1 for missing ones.

        effort: lists to probe. selector: FAISS's, the rows to search (None: all). device: a GPU to
        search on, always over all rows. Raises InvalidInput if FAISS does not see this GPU.
        """
        moved = np.ascontiguousarray(queries @ self.metric.of_queries, dtype=np.float32)
        library, probed = faiss(), min(effort, int(self.index.nlist))
        if device is None:
            parameters = library.SearchParametersIVF(sel=selector, nprobe=probed)
            found: np.ndarray = self.index.search(moved, count, params=parameters)[1]
            return found
        with _gpu:
            if self.on_gpu is None:
                self.on_gpu = _on_gpu(self.index, device.index or 0)
            parameters = library.SearchParametersIVF(nprobe=min(probed, _MOST_ON_GPU))
            found = self.on_gpu.search(moved, min(count, _MOST_ON_GPU), params=parameters)[1]
            return found

    def _calibrate(self, keys: np.ndarray, queries: np.ndarray, top_k: int) -> None:
        """Choose the least effort that finds RECALL of the true top_k, or the greatest effort."""
        scores = torch.from_numpy(queries) @ torch.from_numpy(keys).T  # (m, n)
        best = scores.topk(top_k, -1).indices
        lists = int(self.index.nlist)
        steps = {1, 2, 3, *(base << shift for shift in range(16) for base in (4, 6))}
        for effort in [*sorted(step for step in steps if step < lists), lists]:
            ids = torch.from_numpy(self.search(queries, RESCORED * top_k, effort))
            of_ids = scores.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
            chosen = ids.gather(-1, of_ids.topk(top_k, -1).indices)
            found = (chosen[:, :, None] == best[:, None, :]).any(1)
            self.effort, self.recall = effort, float(found.float().mean())
            if self.recall >= RECALL:
                return


def _trained(keys: np.ndarray) -> Any:
    """Train and fill lists of keys in their metric. Keys are assigned to the nearest centroid; a
    query probes the lists whose centroids have the greatest product with it.
    """
    library, (n, dim) = faiss(), keys.shape
    lists = max(1, min(int(_LISTS * n**0.5), n // _A_LIST))
    sample, pointer = _some(keys, lists * _SAMPLE), library.swig_ptr
    means = library.Kmeans(dim, lists, niter=_ROUNDS, seed=1234)
    means.train(sample)
    index = empty_lists("SQ8", dim, lists)
    index.quantizer.add(means.centroids)

    def nearest(some: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(library.knn(some, means.centroids, 1)[1][:, 0])

    of_sample, of_keys, ids = nearest(sample), nearest(keys), np.arange(n)
    index.train_encoder(len(sample), pointer(sample), pointer(of_sample))
    index.is_trained = True
    index.add_core(n, pointer(keys), pointer(ids), pointer(of_keys))
    return index


def _some(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` rows, evenly spread."""
    if len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]
    return np.ascontiguousarray(rows)


def _on_gpu(index: Any, device: int) -> Any:
    library = faiss()
    count = library.get_num_gpus() if hasattr(library, "StandardGpuResources") else 0
    if device >= count:
        raise InvalidInput(
            f"FAISS does not see GPU {device} ({count} in all): {install_extra('gpu')} on a "
            "machine with one, or keep the index on the CPU"
        )
    return library.index_cpu_to_gpu(library.StandardGpuResources(), device, index)


@dataclass(frozen=True)
class Cover:
    """A scope, divided into the rows that an engine holds and the rest."""

    held: int  # rows of the engine in it
    shift: np.ndarray  # int64 [documents of the engine]: candidate minus row
    selector: Any  # FAISS's, of the rows held; None = all
    rest: list[tuple[int, int, int]]  # runs of blocks that the engine does not hold
    rest_candidates: Ranges  # the candidates that they are


class Header(Parts):
    """The header of an engine's file."""

    documents: list[tuple[int, Positive, bytes]]  # number, blocks, fingerprint of their keys
    top_k: Positive
    efforts: list[Positive]
    recalls: list[Share]


@dataclass
class Engine:
    """The engines of one layer, one for each KV head, over the same rows: the blocks of whole
    documents, one document after the other.
    """

    heads: list[HeadEngine]
    top_k: int  # that the effort was calibrated for
    stored: list[tuple[int, int, bytes]]  # number, blocks, fingerprint, in the order of the rows
    # of those that are unchanged since: number -> place in `stored`
    documents: dict[int, int] = field(default_factory=dict)
    scopes: Remembered = field(default_factory=Remembered)

    def __post_init__(self) -> None:
        self.blocks = np.array([blocks for _, blocks, _ in self.stored], np.int64)
        self.starts = np.cumsum(self.blocks) - self.blocks

    @property
    def size(self) -> int:
        """Number of rows."""
        return int(self.blocks.sum())

    @property
    def live(self) -> int:
        """Number of rows of unchanged documents."""
        return int(self.blocks[[*self.documents.values()]].sum())

    @property
    def bytes(self) -> int:
        """Approximate main memory of the lists."""
        return sum(self.size * (int(head.index.d) + 8) for head in self.heads)

    def drop(self, document: int) -> None:
        """Forget a document that was deleted or changed."""
        if self.documents.pop(document, None) is not None:
            self.scopes.clear()

    def cover(self, scope: Scope) -> Cover:
        """Divide a scope: the engine covers a document only if the scope has all of its blocks."""
        shift, inside = np.zeros(len(self.blocks), np.int64), np.zeros(self.size, bool)
        rest, rest_candidates, at = [], [], 0
        for document, first, end in scope:
            place = self.documents.get(document)
            if place is not None and (first, end) == (0, self.blocks[place]):
                start = self.starts[place]
                inside[start : start + end] = True
                shift[place] = at - start
            elif first < end:
                rest.append((document, first, end))
                rest_candidates.append((at, at + end - first))
            at += max(0, end - first)
        held = int(inside.sum())
        bits = np.packbits(inside, bitorder="little")
        selector = None if held == len(inside) else faiss().IDSelectorBitmap(bits)
        return Cover(held, shift, selector, rest, rest_candidates)

    def propose(
        self,
        q: np.ndarray,
        top_k: int,
        cover: Cover,
        open_rows: np.ndarray | None,
        device: torch.device | None,
    ) -> np.ndarray:
        """Candidates int64 [H, T, RESCORED * top_k] of the scope of `cover`, for q float32 [H, T,
        D]; -1 for missing ones and for rows that are not in open_rows.
        """
        count = RESCORED * top_k
        wider = max(1.0, top_k / self.top_k) * self.size / cover.held
        found = np.full((*q.shape[:2], count), -1, np.int64)
        group = len(q) // len(self.heads)
        for number, head in enumerate(self.heads):
            mine = slice(number * group, (number + 1) * group)
            asked = np.ones(q[mine].shape[:2], bool) if open_rows is None else open_rows[mine]
            if asked.any():
                effort = int(np.ceil(head.effort * wider))
                rows = head.search(q[mine][asked], count, effort, cover.selector, device)
                found[mine][asked, : rows.shape[1]] = rows
        place = np.searchsorted(self.starts, found, "right") - 1
        return np.where(found < 0, -1, found + cover.shift[place])

    # Files

    def to_parts(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The header and the arrays of the engine's file."""
        header = {
            "documents": self.stored,
            "top_k": self.top_k,
            "efforts": [head.effort for head in self.heads],
            "recalls": [head.recall for head in self.heads],
        }
        parts: list[np.ndarray] = []
        for head in self.heads:
            metric = head.metric
            parts += [metric.mean, metric.of_keys, metric.of_queries, *arrays_of(head.index)]
        return header, parts

    @classmethod
    def of_parts(
        cls, header: Header, parts: Sequence[np.ndarray], num_kv_heads: int, dim: int
    ) -> "Engine":
        """Read what `to_parts` returned; no document counts as unchanged yet. Raises ValueError,
        and what FAISS raises, for parts of anything but an engine of `num_kv_heads` heads of `dim`
        numbers.
        """
        rest, heads = iter(parts), list[HeadEngine]()
        rows = sum(blocks for _, blocks, _ in header.documents)
        for effort, recall in zip(header.efforts, header.recalls, strict=True):
            shapes = (dim,), (dim, dim), (dim, dim)
            metric = [floats(next(rest)).reshape(shape) for shape in shapes]
            index, ids = index_of("SQ8", dim, rest)
            if len(ids) != rows or not np.array_equal(np.sort(ids), np.arange(rows)):
                raise ValueError("a row is missing, or there twice")
            heads.append(HeadEngine(QueryMetric(*metric), index, effort, recall))
        if len(heads) != num_kv_heads or next(rest, None) is not None:
            raise ValueError(f"{len(heads)} heads instead of {num_kv_heads}")
        return cls(heads, header.top_k, header.documents)
