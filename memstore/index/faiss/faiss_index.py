"""Approximate search: FAISS proposes candidates, the packed keys give their exact scores.

Nothing that FAISS holds is trusted for a number: what it misses is missed, what it finds is scored
from the packed keys. Keys that were added since an engine was built are searched exactly, and join
the engine when there are enough of them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.index.block_rows import Hits, Rows, Scope, to_candidates, to_rows
from memstore.index.faiss.faiss_candidates import (
    Built,
    Parts,
    divide,
    pays,
    propose,
    propose_on_gpu,
    rescore,
)
from memstore.index.faiss.faiss_head import FAMILY, HeadIndex, faiss
from memstore.index.packed import Lookup, PackedIndex
from memstore.kernels.api import landmark_topk

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
        """Sample the queries of the searches in the block, in place of earlier samples."""
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


RECALL = 0.95  # share of the true top blocks that an engine is calibrated to find
LEAST = 256  # keys that are worth building anything over
_JOIN = 1 / 4  # of an engine's size: so many new keys join it
_LEAST_JOIN = 4096


class FaissIndex(PackedIndex):
    """Candidates by FAISS a (layer, KV head), exact scores from the packed keys.

    An engine is built by `build`; until then, for small scopes, and where every candidate counts
    (return_lse), the search is exact. auto: ask the engine only where that is cheaper than the
    exact search, by a model of both.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        auto: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """An empty index; see PackedIndex. Raises InvalidInput where FAISS is missing (unless
        auto).
        """
        if not auto:
            faiss()
        super().__init__(num_kv_heads, head_dim, dtype, device=device)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.auto = auto
        self.kind = "auto" if auto else f"faiss-{FAMILY}"
        self.built: dict[int, Built] = {}
        # for adding, dropping and building; taken before the lock of a search
        self._changing = threading.RLock()
        self.queries = QuerySamples()
        self.asked = 0  # searches that an engine answered

    # What is held

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        """See PackedIndex.add."""
        with self._changing:
            super().add(document, layer, first_block, keys)
            built = self.built.get(layer)
            if built is not None:
                built.scopes.clear()
                self.join(layer)

    def trim(self, document: int, first_block: int, layer: int | None = None) -> set[int]:
        """See PackedIndex.trim."""
        with self._changing, self._lock:
            changed = super().trim(document, first_block, layer)
            for number, built in self.built.items():
                if (layer is None or number == layer) and (
                    built.rows.trim(document, first_block) or number in changed
                ):
                    built.scopes.clear()
            return changed

    def _missing(self, layer: int, built: Built) -> list[tuple[int, int, int]]:
        """(document, first block, blocks) that an engine does not hold yet, of documents that are
        no session's own.
        """
        packed = self._layers[layer]
        missing = []
        for document in sorted(packed.rows.documents()):
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
            documents = packed.rows.documents()
            spans = [packed.rows.span(document) for document in documents if document > 0]
            return sum(end - first for first, end in spans)

    def join(self, layer: int) -> bool:
        """Add missing keys to a layer's engines, if there are enough; return whether there were."""
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

    def drop_engines(self) -> None:
        """Hold no engine, and no queries to make one with."""
        with self._changing, self._lock:
            self.built.clear()
            self.queries.kept = {}

    def install(self, layer: int, built: Built) -> None:
        """Take over a layer's engines from a file; keys that they lack join them where there are
        enough.
        """
        with self._changing:
            with self._lock:
                self.built[layer] = built
            self.join(layer)

    # Building

    def build(self, layer: int, top_k: int = 4) -> None:
        """Rebuild a layer's engines over the documents it holds; searches are exact until then.

        top_k: the blocks wanted of a search, for which the effort is calibrated.
        """
        with self._changing:
            self.built.pop(layer, None)
            packed = self._layers.get(layer)
            rows = Rows()
            if packed is not None:
                documents = sorted(document for document in packed.rows.documents() if document > 0)
                scope = [(document, *packed.rows.span(document)) for document in documents]
                for document, first, end in scope:
                    rows.append(document, first, end - first)
            if rows.end < LEAST:
                return
            keys, samples = self._numbers(layer, scope), self.queries.kept
            none = np.zeros((0, keys.shape[2]), np.float32)
            heads = [
                HeadIndex.calibrated(of_head, samples.get((layer, number), none), top_k, RECALL)
                for number, of_head in enumerate(keys)
            ]
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
                "family": FAMILY,
                "landmarks": built.rows.live,
                "effort": [head.calibration.effort for head in built.heads],
                "recall": [round(head.calibration.recall, 3) for head in built.heads],
            }
            for layer, built in sorted(self.built.items())
        }
        return super().describe() | {"engines": engines, "asked": self.asked}

    # Searching

    def _begin(self, lookup: Lookup) -> Callable[[], Hits]:
        self.queries.add(lookup, self._shape[0])
        built = self.built.get(lookup.layer)
        parts = None if built is None or lookup.return_lse else self._parts(built, lookup)
        if built is None or parts is None:
            return super()._begin(lookup)
        self.asked += 1
        if self._on_gpu:
            found = propose_on_gpu(built, parts, lookup, self.device)
        else:
            found = propose(built, parts, lookup)
        return partial(self._rescored, lookup, parts, found)

    def _parts(self, built: Built, lookup: Lookup) -> Parts | None:
        """What the engines are asked for and what is left; None where the search is to be exact."""
        parts: Parts | None = built.scopes.get(lookup.scope, lambda: divide(built, lookup))
        if parts is None or (self._on_gpu and parts.selector is not None):
            return None
        if self.auto and not pays(built, parts, lookup):
            return None
        if lookup.bias is not None:  # which an engine knows nothing of
            held = (lookup.bias[start:end] for start, end in parts.held_candidates)
            return None if any(some.any() for some in held) else parts
        return parts

    def _rescored(self, lookup: Lookup, parts: Parts, found: Tensor) -> Hits:
        """The best of the engines' candidates and of what they do not hold, by exact scores."""
        q = lookup.q.to(self.device)
        bias = None if lookup.bias is None else lookup.bias.to(self.device)
        found = found.to(self.device)
        if parts.rest:
            exact = landmark_topk(
                q,
                lookup.packed.keys,
                parts.rest,
                lookup.top_k,
                kv_heads=lookup.kv_heads,
                bias=None
                if bias is None
                else torch.cat([bias[a:b] for a, b in parts.rest_candidates]),
            )
            rest = to_rows(to_candidates(exact.rows, parts.rest), parts.rest_candidates)
            found = torch.cat([found, rest], -1)
        scores, candidates = rescore(
            q, lookup.packed.keys, lookup.ranges, found, lookup.top_k, bias
        )
        return Hits(scores.to(lookup.q.device), candidates.to(lookup.q.device), None)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"
