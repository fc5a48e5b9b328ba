"""The landmark index: all landmark keys of a layer in one tensor, searched exactly by one product
for all KV heads, or by FAISS engines that propose candidates, which the keys then score exactly.

An engine may miss a block, but every score is exact. Keys that were added after an engine was built
are searched exactly. Engines are stored in a directory, a file for each layer; a file is a cache,
used for its unchanged documents, and deleting it loses nothing.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.index.block_rows import ALL_BLOCKS, Layer, Ranges, Scope, to_rows
from memstore.index.index_file import (
    Unusable,
    content_of,
    decode_file,
    encode_file,
    has_faiss,
    understood,
    write_file,
)
from memstore.index.landmark_engine import Cover, Engine, HeadEngine, Header
from memstore.kernels.api import NEG, Hits, landmark_topk
from memstore.kernels.reference import accumulate

INDEX_KINDS = ("auto", "packed")
PAYING = 65_536  # landmarks of a layer from where on `due` finds an engine worth building
LEAST = 256  # keys that are worth building anything over

_LEAST_ASKED = 16_384  # keys of an engine that a scope must have: fewer are scored sooner exactly
_COVERED = 1 / 4  # the least share of an engine's keys that a scope must have
_SAMPLED = 2048  # queries of a head that are kept

_log = logging.getLogger("memstore")


class LandmarkIndex:
    """Landmark keys of many documents, one namespace a layer. Safe for several threads.

    `build` makes an engine for each layer. Without engines, for small scopes, and if every
    candidate counts (return_lse), the search is exact.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        kind: str = "packed",
        device: torch.device | str = "cpu",
        directory: Path | None = None,
    ) -> None:
        """An empty index of keys [.., num_kv_heads, head_dim], held in `dtype` on `device`.

        kind: "packed": no engines; "auto": engines for large scopes, once built. directory: of the
        engines' files; None for a memory without. Raises InvalidInput for an unknown kind.
        """
        if kind not in INDEX_KINDS:
            raise InvalidInput(f"unknown index {kind!r}: choose one of {', '.join(INDEX_KINDS)}")
        self.kind, self.directory, self.device = kind, directory, torch.device(device)
        self._shape, self._dtype = (num_kv_heads, head_dim), dtype
        self._layers: dict[int, Layer] = {}
        self._lock = threading.RLock()
        self.searches = 0  # calls of search
        self.rows = 0  # query rows (a token of one head) searched in them
        self.asked = 0  # searches that an engine answered
        self.built: dict[int, Engine | None] = {}  # by layer, of those whose file was looked for
        # (layer, KV head) -> queries [n, D], as `sampled` kept them
        self.samples: dict[tuple[int, int], list[Tensor]] = {}
        self._sampling = False
        self._changed: set[int] | None = None  # documents that lost keys since a build began

    # What is held

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        """Append keys [n, Hkv, D] of blocks first_block ..; they must follow the blocks the
        document already has.
        """
        with self._lock:
            packed = self._layers.get(layer)
            if packed is None:
                packed = self._layers[layer] = self._empty()
            packed.add(document, first_block, keys)
            packed.scopes.clear()

    def reserve(self, layer: int, keys: int) -> None:
        """Make room for `keys` more keys, so that adding them in pieces does not move any."""
        with self._lock:
            self._layers.setdefault(layer, self._empty()).reserve(keys)

    def remove(self, document: int) -> None:
        """Drop every key of a document; an unknown document is ignored."""
        self.trim(document, ALL_BLOCKS)

    def trim(self, document: int, first_block: int, layer: int | None = None) -> None:
        """Drop the keys of blocks < first_block, in one layer or in every layer."""
        with self._lock:
            if self._changed is not None:
                self._changed.add(document)
            for number, packed in self._layers.items():
                if (layer is None or number == layer) and packed.rows.trim(document, first_block):
                    packed.scopes.clear()
                    if (engine := self.built.get(number)) is not None:
                        engine.drop(document)

    @property
    def bytes(self) -> int:
        """Memory of keys and engines."""
        with self._lock:
            engines = sum(engine.bytes for engine in self.built.values() if engine is not None)
            return engines + sum(packed.keys.nbytes for packed in self._layers.values())

    def describe(self) -> dict[str, Any]:
        """The kind and the engines of the index, as plain values."""
        with self._lock:
            found: dict[str, Any] = {
                "kind": self.kind,
                "landmarks": {n: packed.rows.live for n, packed in sorted(self._layers.items())},
            }
            if self.kind == "auto":
                found["engines"] = {
                    layer: {
                        "landmarks": engine.live,
                        "effort": [head.effort for head in engine.heads],
                        "recall": [round(head.recall, 3) for head in engine.heads],
                    }
                    for layer, engine in sorted(self.built.items())
                    if engine is not None
                }
                found["asked"] = self.asked
        return found

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
        """The top_k blocks of the scope for each row of q [H, T, D] (rotated and scaled); of equal
        scores the newer first.

        Scores are exact with every engine; an approximate engine may miss a block. With return_lse
        the whole search is exact, because a denominator needs every candidate.

        open_rows: [H, T] bool, the rows to search (None: all); results of other rows are undefined,
        and they are not counted. bias: [candidates of the scope] float32, added to their scores.
        Raises DocumentNotFound if the scope has blocks that the index lacks, InvalidInput for
        queries of another shape than the keys or top_k < 1.
        """
        q = self._checked(q, top_k)
        with self._lock:
            kv_heads = self._count(q, open_rows)
            packed, ranges = self._resolve(layer, scope)
            if self._sampling:
                self._sample(layer, q, open_rows)
            covering = None if return_lse else self._covering(layer, scope, bias)
            rest = [] if covering is None else packed.rows.ranges(covering[1].rest)
        here, keys = q.to(self.device), packed.keys
        bias = None if bias is None else bias.to(self.device)
        if covering is None:
            hits = landmark_topk(
                here, keys, ranges, top_k, return_lse=return_lse, kv_heads=kv_heads, bias=bias
            )
            lse = None if hits.lse is None else hits.lse.to(q.device)
            return Hits(hits.scores.to(q.device), hits.candidates.to(q.device), lse)
        self.asked += 1
        engine, cover = covering
        opened = None if open_rows is None else open_rows.cpu().numpy()
        gpu = self.device if self.device.type == "cuda" else None
        proposed = engine.propose(q.float().cpu().numpy(), top_k, cover, opened, gpu)
        found = torch.from_numpy(proposed).to(self.device)
        if rest:
            at = cover.rest_candidates
            of_rest = None if bias is None else torch.cat([bias[start:end] for start, end in at])
            hits = landmark_topk(here, keys, rest, top_k, kv_heads=kv_heads, bias=of_rest)
            found = torch.cat([found, to_rows(hits.candidates, at)], -1)
        scores, candidates = _best(here, keys, ranges, found, top_k, bias)
        return Hits(scores.to(q.device), candidates.to(q.device), None)

    def _count(self, q: Tensor, open_rows: Tensor | None) -> list[int] | None:
        """Count a search and its rows; return the KV heads that have open rows (None: all)."""
        self.searches += 1
        if open_rows is None:
            self.rows += q.shape[0] * q.shape[1]
            return None
        counts = open_rows.sum(-1).view(self._shape[0], -1).sum(-1).tolist()
        self.rows += sum(counts)
        return [head for head, count in enumerate(counts) if count]

    def _covering(
        self, layer: int, scope: Scope, bias: Tensor | None
    ) -> tuple[Engine, Cover] | None:
        """The engine of a layer and what it covers of a scope; None if the search must be exact."""
        if self.kind == "packed":
            return None
        self.open(layer)
        engine = self.built[layer]
        if engine is None:
            return None
        cover: Cover = engine.scopes.get(scope, lambda: engine.cover(scope))
        if cover.held < max(_LEAST_ASKED, _COVERED * engine.size, 1):
            return None
        if cover.selector is not None and self.device.type == "cuda":
            return None  # a GPU searches all rows
        if bias is not None:  # which an engine knows nothing of
            bias = bias.clone()
            for start, end in cover.rest_candidates:
                bias[start:end] = 0
            if bias.any():
                return None
        return engine, cover

    def keys(self, layer: int, scope: Scope) -> Tensor:
        """Keys [Hkv, N, D] of the N candidates of a scope, read-only."""
        packed, ranges = self._resolve(layer, scope)
        if len(ranges) == 1:
            return packed.keys[:, ranges[0][0] : ranges[0][1]]
        return torch.cat(
            [packed.keys[:, :0], *(packed.keys[:, start:end] for start, end in ranges)], dim=1
        )

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        """Keys [H, ..., D] of candidates [H, ...], each query head from its KV head; -1 gives an
        arbitrary key.
        """
        packed, ranges = self._resolve(layer, scope)
        return gather(packed.keys, ranges, candidates.to(self.device)).to(candidates.device)

    def _checked(self, q: Tensor, top_k: int) -> Tensor:
        """The queries, in float32 or wider, so that scores are those of the keys as held."""
        num_kv_heads, head_dim = self._shape
        if q.dim() != 3 or q.shape[0] % num_kv_heads or q.shape[2] != head_dim:
            raise InvalidInput(
                f"queries of shape {list(q.shape)} do not fit the index: expected [heads, rows, "
                f"{head_dim}] with "
                f"heads a multiple of {num_kv_heads}"
            )
        if top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, is {top_k}")
        return accumulate(q)

    def _empty(self) -> Layer:
        heads, dim = self._shape
        keys = torch.empty(heads, 0, dim, dtype=self._dtype, device=self.device)
        return Layer(keys)

    def _resolve(self, layer: int, scope: Scope) -> tuple[Layer, Ranges]:
        """The layer's current keys, and the rows of the scope in them; rows only move into new
        tensors.
        """
        with self._lock:
            packed = self._layers.get(layer) or self._empty()
            ranges = packed.scopes.get(scope, lambda: packed.rows.ranges(scope))
            return Layer(packed.keys, packed.rows), ranges

    # Building

    @contextmanager
    def sampled(self, layers: Sequence[int]) -> Iterator[None]:
        """Context in which all searches are exact and their queries are sampled, for `build`."""
        with self._lock:
            self.built = dict.fromkeys(layers)
            self.samples, self._sampling = {}, True
        try:
            yield
        finally:
            self._sampling = False

    def _sample(self, layer: int, q: Tensor, opened: Tensor | None) -> None:
        """Store some of a search's queries."""
        heads = self._shape[0]
        rows = None if opened is None else opened.unflatten(0, (heads, -1))
        for head, queries in enumerate(q.detach().unflatten(0, (heads, -1))):
            some = queries.flatten(0, 1) if rows is None else queries[rows[head]]
            kept = self.samples.setdefault((layer, head), [])
            if sum(map(len, kept)) < _SAMPLED:
                kept.append(some.clone())

    def build(self, layers: Sequence[int], top_k: int = 4, progress: Any = None) -> dict[str, Any]:
        """Rebuild and store the engines of layers over all documents, for the queries that
        `sampled` stored; return their description.

        top_k: blocks that a search returns, for which the effort is calibrated. progress: called
        with (layers done, layers). Raises InvalidInput if FAISS is missing, StorageFull,
        ReadOnlyMemory.
        """
        report: Callable[[int, int], None] = progress or (lambda done, every: None)
        for done, layer in enumerate(layers):
            report(done, len(layers))
            engine = self._train(layer, top_k)
            if self.directory is not None:
                # one that is not written anew may have keys of deleted documents
                pieces = None if engine is None else encode_file(*engine.to_parts())
                write_file(self._file(layer), pieces)
        report(len(layers), len(layers))
        return self.describe()

    def _train(self, layer: int, top_k: int) -> Engine | None:
        """Build the engine of a layer's documents; None for few documents."""
        with self._lock:
            sizes = self._documents(layer)
            if sum(sizes.values()) < LEAST:
                self.built[layer] = None
                return None
            self._changed = changed = set[int]()
            scope = [(document, 0, size) for document, size in sizes.items()]
            stored = [(run[0], run[2], _fingerprint(self.keys(layer, [run]))) for run in scope]
            keys = self.keys(layer, scope).float().cpu().numpy()
        heads = []
        for number, of_head in enumerate(keys):
            queries = self.samples.get((layer, number), [])
            none = np.zeros((0, of_head.shape[1]), np.float32)
            some = torch.cat(queries).float().cpu().numpy() if queries else none
            heads.append(HeadEngine.build(of_head, some, top_k))
        with self._lock:
            self._changed = None
            unchanged = {n: at for at, n in enumerate(sizes) if n not in changed}
            engine = self.built[layer] = Engine(heads, top_k, stored, unchanged)
            return engine

    def _documents(self, layer: int) -> dict[int, int]:
        """The number of blocks of each document (no session) whose first block the layer holds."""
        packed = self._layers.get(layer)
        spans = {} if packed is None else packed.rows.spans()
        return {n: end for n, (first, end) in sorted(spans.items()) if n > 0 and first == 0}

    # Files

    def open(self, layer: int) -> None:
        """Read a layer's engine from its file, once; if the file cannot be read, the search is
        exact.
        """
        with self._lock:
            if layer in self.built:
                return
            self.built[layer] = None
            try:
                if self.directory is not None and has_faiss():
                    self.built[layer] = self._read(layer)
            except FileNotFoundError:
                pass
            except (Unusable, OSError) as problem:
                _log.warning(
                    "%s: %s; searching exactly until `memstore index` has run",
                    self.directory,
                    problem,
                )

    def due(self, layers: Sequence[int]) -> bool:
        """Whether to build: a layer has many landmarks, and its engine covers less than 3/4 of
        them, or less than half of the engine is still valid.
        """
        for layer in layers if has_faiss() else ():
            with self._lock:
                self.open(layer)
                landmarks, engine = sum(self._documents(layer).values()), self.built[layer]
                live, size = (0, 0) if engine is None else (engine.live, engine.size)
            if landmarks >= PAYING and live < max(0.75 * landmarks, size / 2):
                return True
        return False

    def drop(self) -> None:
        """Drop engines and queries; the next search reads the files again."""
        with self._lock:
            self.built, self.samples = {}, {}

    def _file(self, layer: int) -> Path:
        assert self.directory is not None
        return self.directory / f"layer-{layer}.idx"

    def _read(self, layer: int) -> Engine:
        """A layer's engine, for its unchanged documents. Raises Unusable, FileNotFoundError,
        OSError.
        """
        path = self._file(layer)
        header, parts = decode_file(path.name, content_of(path), Header)
        with understood(path.name):
            engine = Engine.of_parts(header, parts, *self._shape)
        sizes = self._documents(layer)
        for place, (document, size, fingerprint) in enumerate(engine.stored):
            run = (document, 0, size)
            held = sizes.get(document, 0) >= size
            if held and _fingerprint(self.keys(layer, [run])) == fingerprint:
                engine.documents[document] = place
        return engine


def gather(keys: Tensor, ranges: Ranges, candidates: Tensor) -> Tensor:
    """Keys [H, ..., D] of candidates [H, ...] from keys [Hkv, N, D]; -1 gives an arbitrary key."""
    if not ranges:
        return keys.new_zeros(*candidates.shape, keys.shape[-1])
    rows = to_rows(candidates, ranges).clamp_min(0)
    kv_heads = torch.arange(len(keys), device=keys.device).repeat_interleave(
        len(candidates) // len(keys)
    )
    return keys[kv_heads.view(-1, *[1] * (rows.dim() - 1)), rows]


def _fingerprint(keys: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(keys.cpu().contiguous().view(torch.uint8).numpy().data)


def _best(
    q: Tensor, keys: Tensor, ranges: Ranges, candidates: Tensor, top_k: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The top_k of candidates [H, T, C] (-1: none, in any order, C >= top_k) by exact scores; of
    equal scores the newer first. Returns scores [H, T, top_k] float32 (NEG: none) and candidates.
    """
    exact = torch.promote_types(keys.dtype, torch.float32)
    chosen = gather(keys, ranges, candidates).to(exact)  # (H, T, C, D)
    scores = (chosen @ q.to(exact)[..., None])[..., 0]
    if bias is not None:
        scores = scores + bias[candidates.clamp_min(0)]
    scores = scores.masked_fill(candidates < 0, NEG)
    newest = candidates.argsort(-1, descending=True)
    best = scores.gather(-1, newest).sort(dim=-1, descending=True, stable=True)
    candidates = candidates.gather(-1, newest).gather(-1, best.indices)
    return best.values[..., :top_k], candidates[..., :top_k]
