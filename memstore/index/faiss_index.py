"""Approximate search: engines of FAISS propose candidates, the packed keys give their exact scores.

An engine may miss a block and never misjudges one. Keys that were added since it was built are
searched exactly. Engines are stored in a directory, a file a layer; a file is a cache, used for
those of its documents that are unchanged, and deleting it loses nothing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.disk.files import sweep
from memstore.index.block_rows import Ranges, to_rows
from memstore.index.index_file import Unusable, read_file, refusals, understood, write_file
from memstore.index.inverted_lists import has_faiss
from memstore.index.landmark_engine import Cover, Engine, HeadEngine, Header
from memstore.index.packed import Lookup, PackedIndex, gather
from memstore.kernels.api import NEG, Hits, landmark_topk

PAYING = 65_536  # landmarks of a layer from where on `due` finds an engine worth building
LEAST = 256  # keys that are worth building anything over

_LEAST_ASKED = 16_384  # keys of an engine that a scope must have: fewer are scored sooner exactly
_COVERED = 1 / 4  # the least share of an engine's keys that a scope must have
_SAMPLED = 2048  # queries of a head that are kept

_log = logging.getLogger("memstore")


class FaissIndex(PackedIndex):
    """Candidates by an engine a layer, exact scores from the packed keys.

    `build` makes the engines; until then, for small scopes, and where every candidate counts
    (return_lse), the search is exact.
    """

    kind = "auto"

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
        directory: Path | None = None,
    ) -> None:
        """An empty index; see PackedIndex. directory: of the files; None for a memory without."""
        super().__init__(num_kv_heads, head_dim, dtype, device=device)
        self.directory = directory
        self.built: dict[int, Engine | None] = {}  # by layer, of those whose file was looked for
        self.asked = 0  # searches that an engine answered
        # (layer, KV head) -> queries [n, D], as `sampled` kept them
        self.samples: dict[tuple[int, int], list[Tensor]] = {}
        self._sampling = False
        self._changed: set[int] | None = None  # documents that lost keys since a build began

    def trim(self, document: int, first_block: int, layer: int | None = None) -> set[int]:
        """See PackedIndex.trim."""
        with self._lock:
            changed = super().trim(document, first_block, layer)
            if self._changed is not None:
                self._changed.add(document)
            for number in changed:
                if (engine := self.built.get(number)) is not None:
                    engine.drop(document)
            return changed

    @property
    def bytes(self) -> int:
        return super().bytes + sum(engine.bytes for engine in self._engines().values())

    def describe(self) -> dict[str, Any]:
        engines = {
            layer: {
                "landmarks": engine.live,
                "effort": [head.effort for head in engine.heads],
                "recall": [round(head.recall, 3) for head in engine.heads],
            }
            for layer, engine in sorted(self._engines().items())
        }
        return super().describe() | {"engines": engines, "asked": self.asked}

    def _engines(self) -> dict[int, Engine]:
        with self._lock:
            return {layer: engine for layer, engine in self.built.items() if engine is not None}

    # Building

    @contextmanager
    def sampled(self, layers: Sequence[int]) -> Iterator[None]:
        """Sample the queries of the searches in the block, all of them exact, for `build`."""
        with self._lock:
            self.built = dict.fromkeys(layers)
            self.samples, self._sampling = {}, True
        try:
            yield
        finally:
            self._sampling = False

    def _sample(self, lookup: Lookup) -> None:
        """Keep some of a search's queries."""
        grouped = lookup.q.detach().unflatten(0, (self._shape[0], -1))
        opened = lookup.open_rows
        opened = None if opened is None else opened.unflatten(0, (self._shape[0], -1))
        with self._lock:
            for head, queries in enumerate(grouped):
                some = queries.flatten(0, 1) if opened is None else queries[opened[head]]
                kept = self.samples.setdefault((lookup.layer, head), [])
                if sum(map(len, kept)) < _SAMPLED:
                    kept.append(some.clone())

    def build(self, layers: Sequence[int], top_k: int = 4, progress: Any = None) -> dict[str, Any]:
        """Rebuild the engines of layers over all documents, for the queries that `sampled` kept,
        and store them; return their description.

        top_k: the blocks wanted of a search, for which the effort is calibrated. progress: called
        with (layers done, layers). Raises InvalidInput where FAISS is missing, StorageFull,
        ReadOnlyMemory.
        """
        report: Callable[[int, int], None] = progress or (lambda done, every: None)
        if self.directory is not None and not self.directory.is_symlink():
            sweep(self.directory)
        for done, layer in enumerate(layers):
            report(done, len(layers))
            engine = self._train(layer, top_k)
            if self.directory is None:
                continue
            with refusals(self.directory):
                if engine is not None:
                    write_file(self._file(layer), *engine.to_parts())
                elif not self.directory.is_symlink():  # it may have keys of deleted documents
                    self._file(layer).unlink(missing_ok=True)
        report(len(layers), len(layers))
        return self.describe()

    def _train(self, layer: int, top_k: int) -> Engine | None:
        """Make the engine over a layer's documents; None where they are few."""
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
        """The blocks of the documents (not of sessions) that a layer holds from the first on."""
        packed = self._layers.get(layer)
        spans = {} if packed is None else {n: packed.rows.span(n) for n in packed.rows.documents()}
        return {n: end for n, (first, end) in sorted(spans.items()) if n > 0 and first == 0}

    # Files

    def open(self, layer: int) -> None:
        """Take a layer's engine from its file, the first time; without one that can be read the
        search is exact.
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
        """Is it time to build: are there many landmarks of which an engine holds less than 3/4, or
        an engine of which less than half is left?
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
        """Hold no engine and no queries; the next search reads the files again."""
        with self._lock:
            self.built, self.samples = {}, {}

    def _file(self, layer: int) -> Path:
        assert self.directory is not None
        return self.directory / f"layer-{layer}.idx"

    def _read(self, layer: int) -> Engine:
        """A layer's engine, for those documents that are unchanged. Raises Unusable,
        FileNotFoundError, OSError.
        """
        path = self._file(layer)
        header, parts = read_file(path, Header)
        with understood(path.name):
            engine = Engine.of_parts(header, parts, *self._shape)
        sizes = self._documents(layer)
        for place, (document, size, fingerprint) in enumerate(engine.stored):
            run = (document, 0, size)
            held = sizes.get(document, 0) >= size
            if held and _fingerprint(self.keys(layer, [run])) == fingerprint:
                engine.documents[document] = place
        return engine

    # Searching

    def _find(self, lookup: Lookup) -> Hits:
        if self._sampling:
            self._sample(lookup)
        with self._lock:
            self.open(lookup.layer)
            engine = self.built[lookup.layer]
            cover = None if engine is None else self._cover(engine, lookup)
            rest = [] if cover is None else lookup.packed.rows.ranges(cover.rest)
        if engine is None or cover is None:
            return super()._find(lookup)
        self.asked += 1
        opened = None if lookup.open_rows is None else lookup.open_rows.cpu().numpy()
        numbers = lookup.q.float().cpu().numpy()
        gpu = self.device if self.device.type == "cuda" else None
        proposed = engine.propose(numbers, lookup.top_k, cover, opened, gpu)
        found = torch.from_numpy(proposed).to(self.device)
        return self._rescored(lookup, found, rest, cover.rest_candidates)

    def _cover(self, engine: Engine, lookup: Lookup) -> Cover | None:
        """What an engine holds of a scope; None where the search is to be exact."""
        if lookup.return_lse:
            return None
        cover: Cover = engine.scopes.get(lookup.scope, lambda: engine.cover(lookup.scope))
        if cover.held < max(_LEAST_ASKED, _COVERED * engine.size, 1):
            return None
        if cover.selector is not None and self.device.type == "cuda":
            return None  # a GPU searches all rows
        if lookup.bias is not None:  # which an engine knows nothing of
            bias = lookup.bias.clone()
            for start, end in cover.rest_candidates:
                bias[start:end] = 0
            return None if bias.any() else cover
        return cover

    def _rescored(self, lookup: Lookup, found: Tensor, rest: Ranges, at: Ranges) -> Hits:
        """The best of an engine's candidates and of the rest, by exact scores.

        rest: rows of the packed keys that the engine does not hold; at: the candidates they are.
        """
        q, keys, bias = lookup.q.to(self.device), lookup.packed.keys, lookup.bias
        bias = None if bias is None else bias.to(self.device)
        if rest:
            of_rest = None if bias is None else torch.cat([bias[start:end] for start, end in at])
            hits = landmark_topk(
                q, keys, rest, lookup.top_k, kv_heads=lookup.kv_heads, bias=of_rest
            )
            found = torch.cat([found, to_rows(hits.candidates, at)], -1)
        scores, candidates = _best(q, keys, lookup.ranges, found, lookup.top_k, bias)
        return Hits(scores.to(lookup.q.device), candidates.to(lookup.q.device), None)


def _fingerprint(keys: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(keys.cpu().contiguous().view(torch.uint8).numpy().data)


def _best(
    q: Tensor, keys: Tensor, ranges: Ranges, candidates: Tensor, top_k: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The top_k of candidates [H, T, C] (-1 = none, in any order, C >= top_k) by exact scores; of
    equals the newer first. Returns scores [H, T, top_k] float32 (NEG: none) and candidates.
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
