"""Approximate search: FAISS proposes candidates, the packed keys give their exact scores.

Nothing that FAISS holds is trusted for a number: what it misses is missed, what it finds is scored
from the packed keys. Keys that were added since an engine was built are searched exactly beside it,
and join it when there are enough of them.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.index.base import Hits, Scope
from memstore.index.faiss_gpu import GpuHead
from memstore.index.faiss_head import Calibration, Family, HeadIndex, faiss, selector
from memstore.index.packed import RESCORED, Layer, PackedIndex, rescore
from memstore.index.rows import Ranges, Remembered, Rows, join, to_candidates, to_rows, total
from memstore.kernels.api import landmark_topk

RECALL = 0.95
LEAST = 256  # keys that are worth building anything over
_JOIN = 1 / 4  # of an engine's size: so many new keys join it
_LEAST_JOIN = 4096
_STALE = 1 / 2  # of an engine's rows: with fewer still held by a document it is built anew
# the least share of an engine's keys that a scope may have for the engine to be asked
_COVERED = 1 / 4
_SAMPLED = 2048  # queries of a head that are kept
_CALIBRATED = 256  # queries that the effort is chosen by
_A_ROW = 0.45  # what a further query row costs an exact search, of its first

log = logging.getLogger("memstore")


@dataclass
class Built:
    """The engines of one layer, one a KV head, all with the same rows."""

    heads: list[HeadIndex]
    rows: Rows
    trained: int  # rows when it was trained
    scopes: Remembered = field(default_factory=Remembered)
    copies: list[GpuHead] = field(default_factory=list)  # of the heads, on the index's GPU

    @property
    def family(self) -> Family:
        """What all of them are."""
        return self.heads[0].family

    @property
    def stale(self) -> bool:
        """Has it outlived what it was trained on?"""
        return self.rows.live < _STALE * self.rows.end or self.rows.end > 4 * self.trained


@dataclass(frozen=True)
class Parts:
    """A scope, divided into what the engines hold and the rest: ranges of rows, and the candidates
    they stand for.
    """

    held: Ranges  # rows of the engines
    held_candidates: Ranges
    rest: Ranges  # rows of the packed keys
    rest_candidates: Ranges
    selector: Any


class FaissIndex(PackedIndex):
    """Candidates by a FAISS family a (layer, KV head), exact scores from the packed keys.

    An engine is built by `build`; until then, for small scopes, and where every candidate counts
    (return_lse), the search is exact. recall: the share of the true top blocks that an engine's
    effort is calibrated to find (None: 0.95). thrifty: ask the engine only where it is cheaper than
    the exact search, by a model of both (what "auto" does).
    """

    def __init__(
        self,
        family: Family,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        recall: float | None = None,
        thrifty: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """An empty index; see PackedIndex. Raises InvalidInput where FAISS is missing (unless
        thrifty).
        """
        if not thrifty:
            faiss()
        super().__init__(num_kv_heads, head_dim, dtype, device=device)
        self.family, self.wanted_recall, self.thrifty = family, recall, thrifty
        self.recall = RECALL if recall is None else recall
        self.kind = "auto" if thrifty else f"faiss-{family}"
        self.built: dict[int, Built] = {}
        # for adding, dropping and building; taken before the lock of a search
        self._changing = threading.RLock()
        self._sampling = False
        # (layer, KV head) -> queries [n, D]
        self._samples: dict[tuple[int, int], list[Tensor]] = {}
        self.asked = 0  # searches that an engine answered

    # What is held

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        with self._changing:
            super().add(document, layer, first_block, keys)
            built = self.built.get(layer)
            if built is not None:
                built.scopes.clear()
                self.join(layer)

    def _keep(self, document: int, first: int, end: int, layer: int | None = None) -> None:
        with self._changing, self._lock:
            super()._keep(document, first, end, layer)
            for number, built in self.built.items():
                if layer is None or number == layer:
                    built.rows.keep(document, first, end)
                    built.scopes.clear()

    def _missing(self, layer: int, built: Built) -> list[tuple[int, int, int]]:
        """(document, first block, blocks) that an engine does not hold yet, of documents that are
        no session's own.
        """
        packed = self._layers[layer]
        missing = []
        for document in packed.rows.runs:
            first, end = packed.rows.span(document)
            if document < 0:
                continue
            start = max(first, built.rows.span(document)[1])
            if end > start:
                missing.append((document, start, end - start))
        return missing

    def landmarks(self, layer: int) -> int:
        """Blocks of documents (not of sessions) that a layer holds."""
        with self._lock:
            packed = self._layers.get(layer)
            if packed is None:
                return 0
            spans = [packed.rows.span(document) for document in packed.rows.runs if document > 0]
            return sum(end - first for first, end in spans)

    def join(self, layer: int) -> bool:
        """Add to a layer's engines the keys that they lack, if there are enough of them; were
        there?
        """
        with self._changing:
            built = self.built[layer]
            missing = self._missing(layer, built)
            if sum(size for _, _, size in missing) <= max(_LEAST_JOIN, _JOIN * built.rows.end):
                return False
            with self._lock:
                for document, first, size in missing:
                    keys = self._numbers(layer, [(document, first, first + size)])
                    for head, index in enumerate(built.heads):
                        index.add(keys[head])
                    built.rows.append(document, first, size)
                built.scopes.clear()
            return True

    def install(self, layer: int, built: Built) -> None:
        """Take over a layer's engines from a file; keys that they lack join them where there are
        enough.
        """
        with self._changing:
            with self._lock:
                self.built[layer] = built
            self.join(layer)

    # Building

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Keep the queries of the searches made meanwhile: what `build` trains and calibrates
        with.
        """
        self._samples.clear()
        self._sampling = True
        try:
            yield
        finally:
            self._sampling = False

    @property
    def samples(self) -> dict[tuple[int, int], np.ndarray]:
        """The queries float32 [n, D] kept for a (layer, KV head)."""
        with self._lock:
            return {
                key: torch.cat(queries).float().cpu().numpy()
                for key, queries in self._samples.items()
            }

    @samples.setter
    def samples(self, queries: dict[tuple[int, int], np.ndarray]) -> None:
        with self._lock:
            self._samples = {
                key: [torch.from_numpy(np.ascontiguousarray(x))] for key, x in queries.items()
            }

    def build(self, layer: int, top_k: int = 4) -> None:
        """Build a layer's engines anew over the documents it holds; searches go on exactly
        meanwhile.

        top_k: the blocks wanted of a search, for which the effort is calibrated.
        """
        with self._changing:
            self.built.pop(layer, None)
            packed = self._layers.get(layer)
            rows = Rows()
            if packed is not None:
                documents = sorted(document for document in packed.rows.runs if document > 0)
                scope = [(document, *packed.rows.span(document)) for document in documents]
                for document, first, end in scope:
                    rows.append(document, first, end - first)
            if rows.end < LEAST:
                return
            keys, samples = self._numbers(layer, scope), self.samples
            heads = []
            for number, of_head in enumerate(keys):
                queries = samples.get((layer, number), np.zeros((0, of_head.shape[1]), np.float32))
                train, held_out = (
                    (queries[::2], queries[1::2]) if len(queries) >= 64 else (queries, queries)
                )
                head = HeadIndex.build(self.family, of_head, train)
                if len(held_out):
                    calibrate(head, of_head, held_out, top_k, self.recall)
                # a gate that never opened while queries were sampled: nothing tells how little
                # would do
                else:
                    head.calibration = Calibration(head.efforts[-1], top_k)
                heads.append(head)
            with self._lock:
                self.built[layer] = Built(heads, rows, rows.end)

    def _numbers(self, layer: int, scope: Scope) -> np.ndarray:
        """Keys float32 [Hkv, n, D] of a scope."""
        keys: np.ndarray = self.keys(layer, scope).float().cpu().numpy()
        return keys

    def fingerprint(self, layer: int, document: int, first_block: int, size: int) -> bytes:
        """A hash of the landmark keys of consecutive blocks."""
        keys = self.keys(layer, [(document, first_block, first_block + size)]).cpu()
        digest = xxhash.xxh3_128()
        for of_head in keys:
            digest.update(of_head.contiguous().view(torch.uint8).numpy())
        return digest.digest()

    @property
    def bytes(self) -> int:
        return super().bytes + sum(
            head.bytes for built in self.built.values() for head in built.heads
        )

    def describe(self) -> dict[str, Any]:
        engines = {
            layer: {
                "family": built.family,
                "landmarks": built.rows.live,
                "effort": [head.calibration.effort for head in built.heads],
                "recall": [round(head.calibration.recall, 3) for head in built.heads],
            }
            for layer, built in sorted(self.built.items())
        }
        return super().describe() | {"engines": engines, "asked": self.asked}

    # Searching

    def search(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        open_rows: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Hits:
        if self._sampling:
            self._sample(layer, q, open_rows)
        if layer not in self.built or return_lse:
            return super().search(
                layer, q, scope, top_k, return_lse=return_lse, open_rows=open_rows, bias=bias
            )
        q = self._checked(q, top_k)
        with self._lock:
            packed, ranges = self._resolve(layer, scope)
            built = self.built.get(layer)
            parts = None if built is None else self._parts(layer, built, packed, scope)
            rows, kv_heads = self._count(q, open_rows)
            partial = parts is not None and parts.selector is not None
            if (
                built is None
                or parts is None
                or (partial and self._on_gpu)
                or (self.thrifty and not self._pays(built, parts, rows, top_k))
                or (
                    bias is not None
                    and any(bias[start:end].any() for start, end in parts.held_candidates)
                )
            ):
                return self._exact(q, packed, ranges, top_k, return_lse, kv_heads, bias)
            self.asked += 1
            found = (self._gpu_candidates if self._on_gpu else self._candidates)(
                built, parts, q, top_k, open_rows
            )
        if parts.rest:
            exact = landmark_topk(
                q.to(self.device),
                packed.keys,
                parts.rest,
                top_k,
                kv_heads=kv_heads,
                bias=None
                if bias is None
                else torch.cat([bias[a:b] for a, b in parts.rest_candidates]).to(self.device),
            )
            rest = to_candidates(exact.rows, parts.rest)
            found = torch.cat([found, to_rows(rest, parts.rest_candidates).to(found.device)], -1)
        bias = None if bias is None else bias.to(self.device)
        scores, candidates = rescore(
            q.to(self.device), packed.keys, ranges, found.to(self.device), top_k, bias
        )
        return Hits(scores.to(q.device), candidates.to(q.device), None)

    def _candidates(
        self, built: Built, parts: Parts, q: Tensor, top_k: int, open_rows: Tensor | None
    ) -> Tensor:
        """What the engines propose: candidates int64 [H, T, RESCORED * top_k], -1 where there is
        none.
        """
        count, group = RESCORED * top_k, q.shape[0] // len(built.heads)
        coverage = total(parts.held) / built.rows.end
        found = np.full((*q.shape[:2], count), -1, dtype=np.int64)
        numbers = q.float().cpu().numpy()
        opened = None if open_rows is None else open_rows.cpu().numpy()
        for number, head in enumerate(built.heads):
            mine = slice(number * group, (number + 1) * group)
            asked = np.ones(found[mine].shape[:2], dtype=bool) if opened is None else opened[mine]
            if asked.any():
                effort = head.effort(top_k, coverage)
                found[mine][asked] = head.search(
                    numbers[mine][asked], count, effort, parts.selector
                )
        return to_rows(to_candidates(torch.from_numpy(found), parts.held), parts.held_candidates)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _gpu_candidates(
        self, built: Built, parts: Parts, q: Tensor, top_k: int, open_rows: Tensor | None
    ) -> Tensor:
        """As `_candidates`, without a copy to the host; all rows are searched, choosing would wait
        for the device.
        """
        count, group = RESCORED * top_k, q.shape[0] // len(built.heads)
        rows = q.to(self.device).unflatten(0, (-1, group))  # (Hkv, group, T, D)
        if not built.copies:
            built.copies = [GpuHead(head, self.device.index or 0) for head in built.heads]
        found = [
            copy.search(of_head.flatten(0, 1), count, copy.head.effort(top_k, 1.0))
            for of_head, copy in zip(rows, built.copies)
        ]
        candidates = to_candidates(torch.stack(found).view(*q.shape[:2], count), parts.held)
        return to_rows(candidates, parts.held_candidates)

    def _parts(self, layer: int, built: Built, packed: Layer, scope: Scope) -> Parts | None:
        """The scope in rows of the engines and the rest in packed rows; None if the engines hold
        too little of it.
        """
        found: Parts | None = built.scopes.get(
            scope, lambda: self._divide(layer, built, packed, scope)
        )
        return found

    @staticmethod
    def _divide(layer: int, built: Built, packed: Layer, scope: Scope) -> Parts | None:
        held: Ranges = []
        held_candidates: Ranges = []
        rest: Ranges = []
        rest_candidates: Ranges = []
        at = 0
        for document, first, end in scope:
            have_first, have_end = built.rows.span(document)
            low, high = min(max(first, have_first), end), max(min(end, have_end), first)
            pieces = [(first, low, False), (low, high, True), (high, end, False)]
            for start, stop, in_engine in pieces if low < high else [(first, end, False)]:
                if start < stop:
                    rows = (built.rows if in_engine else packed.rows).ranges(
                        layer, [(document, start, stop)]
                    )
                    for some in rows:
                        join(held if in_engine else rest, *some)
                    join(held_candidates if in_engine else rest_candidates, at, at + stop - start)
                    at += stop - start
        if total(held) < max(1, _COVERED * built.rows.end):
            return None
        return Parts(held, held_candidates, rest, rest_candidates, selector(held, built.rows.end))

    def _pays(self, built: Built, parts: Parts, rows: int, top_k: int) -> bool:
        """Is asking the engines cheaper than the exact search? rows: of all heads."""
        each = max(1.0, rows / len(built.heads))
        coverage = total(parts.held) / built.rows.end
        exact = total(parts.held) * max(1.0, _A_ROW * each)
        asking = sum(head.cost(each, top_k, coverage) for head in built.heads) / len(built.heads)
        return asking < exact

    def _sample(self, layer: int, q: Tensor, open_rows: Tensor | None) -> None:
        grouped = q.detach().unflatten(0, (self._shape[0], -1))
        opened = None if open_rows is None else open_rows.unflatten(0, (self._shape[0], -1))
        with self._lock:
            for head, queries in enumerate(grouped):
                some = queries.flatten(0, 1) if opened is None else queries[opened[head]]
                kept = self._samples.get((layer, head), [])
                if len(some) and sum(map(len, kept)) < _SAMPLED:
                    self._samples[layer, head] = [*kept, some.clone()]


def calibrate(
    head: HeadIndex, keys: np.ndarray, queries: np.ndarray, top_k: int, target: float
) -> None:
    """Choose the least effort of an engine over keys [n, D] that finds `target` of the true top_k
    of queries [m, D].
    """
    some = queries[
        np.linspace(0, len(queries) - 1, min(len(queries), _CALIBRATED)).astype(np.int64)
    ]
    scores = torch.from_numpy(some) @ torch.from_numpy(keys).T  # (m, n)
    best = scores.topk(min(top_k, len(keys)), -1).indices.numpy()

    def exact(found: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(found)
        of_found = scores.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
        chosen: np.ndarray = ids.gather(-1, of_found.topk(best.shape[1], -1).indices).numpy()
        return chosen

    head.calibrate(some, best, exact, target, RESCORED * best.shape[1])
