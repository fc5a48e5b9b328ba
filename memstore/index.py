"""Which blocks does a query want: exact maximum-inner-product search over landmark keys, in one packed tensor a layer
or in FAISS.

Both indexes hold, for every (document, layer), a run of landmark keys of consecutive blocks, and answer for a *scope*:
runs of blocks of chosen documents, oldest first. Nothing here knows where blocks themselves are kept.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.kernels.api import NEG, landmark_topk

Scope = Sequence[tuple[int, int, int]]
"""(document, first_block, end_block) runs, oldest first: the candidates of a search, numbered 0, 1, .. in this order.
"""

INDEX_KINDS = ("auto", "packed", "faiss-flat")


@dataclass(frozen=True)
class Hits:
    """The best candidates of each query row, best first.

    scores: [H, T, top_k] float32, NEG where the scope has fewer candidates.
    candidates: [H, T, top_k] int64, number of the block in the scope (0 = its oldest), -1 where there are fewer.
    lse: [H, T] float32, logsumexp over every candidate of the scope, or None if it was not asked for.
    """

    scores: Tensor
    candidates: Tensor
    lse: Tensor | None


class LandmarkIndex(Protocol):
    """Landmark keys of many documents, one namespace a layer. Safe for several threads."""

    searches: int  # calls of search
    rows: int  # query rows (a token of one head) searched in them

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        """Append keys [n, Hkv, D] of blocks first_block ..; they must follow the blocks the document already has."""

    def remove(self, document: int) -> None:
        """Drop every key of a document; an unknown one is no error."""

    def truncate(self, document: int, blocks: int) -> None:
        """Drop the keys of blocks >= `blocks`, in every layer."""

    def trim(self, document: int, first_block: int, layer: int | None = None) -> None:
        """Drop the keys of blocks < first_block, in one layer or in every layer."""

    def span(self, document: int, layer: int) -> tuple[int, int]:
        """The blocks [first, end) held for a document; (0, 0) if none."""

    def documents(self) -> set[int]:
        """Every document with keys in some layer."""

    def search(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        kv_heads: Sequence[int] | None = None,
    ) -> Hits:
        """The top_k blocks of the scope for each row of q [H, T, D] (rotated and scaled).

        kv_heads: the KV heads that are searched (None = all); the rows of the others find nothing and are not counted.

        Raises DocumentNotFound if the scope names blocks that are not held.
        """

    def keys(self, layer: int, scope: Scope) -> Tensor:
        """Keys [Hkv, N, D] of the N candidates of a scope; do not write to it."""

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        """Keys [H, ..., D] of candidates [H, ...] (-1 gives some key), each query head from its KV head."""

    @property
    def bytes(self) -> int:
        """Memory held for keys."""


def make_index(kind: str, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> LandmarkIndex:
    """An empty index: "packed" (exact, torch), "faiss-flat" (exact, needs faiss-cpu), or "auto" (packed)."""
    if kind in ("auto", "packed"):
        return PackedIndex(num_kv_heads, head_dim, dtype)
    if kind == "faiss-flat":
        return FaissFlatIndex(num_kv_heads, head_dim)
    raise InvalidInput(f"unknown index {kind!r}: choose one of {', '.join(INDEX_KINDS)}")


@dataclass
class _Run:
    """Consecutive blocks of one document in consecutive rows; rows start + size .. start + room are kept free for
    growth.
    """

    first_block: int
    start: int
    size: int
    room: int


def _ranges(runs: dict[int, _Run], layer: int, scope: Scope) -> list[tuple[int, int]]:
    """Row ranges of a scope; empty runs are left out."""
    ranges = []
    for document, first, end in scope:
        if end <= first:
            continue
        run = runs.get(document)
        if run is None or first < run.first_block or end > run.first_block + run.size:
            raise DocumentNotFound(
                f"document {document} has no blocks {first}..{end - 1} in layer {layer}: it was forgotten or changed; "
                "look at the memory's documents again"
            )
        offset = run.start - run.first_block
        ranges.append((first + offset, end + offset))
    return ranges


def _rows_to_candidates(rows: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Rows of the index (-1 = none) as positions in the concatenation of `ranges`."""
    if len(ranges) == 1:
        start = ranges[0][0]
        return rows if start == 0 else torch.where(rows < 0, rows, rows - start)
    if not ranges:
        return rows
    shifts, total = [], 0
    for start, end in ranges:
        shifts.append(total - start)
        total += end - start
    order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
    starts = torch.tensor([ranges[i][0] for i in order], device=rows.device)
    shift = torch.tensor([shifts[i] for i in order], device=rows.device)
    which = torch.searchsorted(starts, rows, right=True) - 1
    return torch.where(rows < 0, rows, rows + shift[which.clamp_min(0)])


def _candidates_to_rows(candidates: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The inverse of _rows_to_candidates; -1 becomes the first row of the scope."""
    candidates = candidates.clamp_min(0)
    if len(ranges) == 1:
        return candidates + ranges[0][0]
    firsts, shifts, total = [], [], 0
    for start, end in ranges:
        firsts.append(total)
        shifts.append(start - total)
        total += end - start
    which = torch.searchsorted(torch.tensor(firsts, device=candidates.device), candidates, right=True) - 1
    return candidates + torch.tensor(shifts, device=candidates.device)[which]


def _expect_next(run: _Run | None, document: int, layer: int, first_block: int) -> None:
    if run is not None and run.first_block + run.size != first_block:
        raise InvalidInput(
            f"document {document}, layer {layer}: landmark keys of block {first_block} added after "
            f"{run.first_block + run.size} blocks; add them in order"
        )


def _rows_of(q: Tensor, num_kv_heads: int, kv_heads: Sequence[int] | None) -> int:
    """Query rows of q [H, T, D] that are searched."""
    rows = q.shape[0] * q.shape[1]
    return rows if kv_heads is None else rows // num_kv_heads * len(kv_heads)


def _no_hits(q: Tensor, top_k: int, return_lse: bool) -> Hits:
    shape = (*q.shape[:2], top_k)
    lse = torch.full(q.shape[:2], NEG) if return_lse else None
    return Hits(torch.full(shape, NEG), torch.full(shape, -1, dtype=torch.int64), lse)


class _PackedLayer:
    """One layer's keys: rows [0, tail) of a tensor that grows by half; a document's run is always in one piece."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.empty(num_kv_heads, 0, head_dim, dtype=dtype)  # (Hkv, capacity, D)
        self.runs: dict[int, _Run] = {}
        self.tail = 0

    def add(self, document: int, first_block: int, keys: Tensor) -> None:
        n = keys.shape[0]
        run = self.runs.get(document)
        if run is None:
            self._reserve(n)
            run = self.runs[document] = _Run(first_block, self.tail, 0, n)
            self.tail += n
        elif run.size + n > run.room:
            at_tail = run.start + run.room == self.tail
            self._reserve(n if at_tail else 2 * (run.size + n))
            if run.start + run.room == self.tail:  # the last run grows where it lies
                missing = run.size + n - run.room
                run.room += missing
                self.tail += missing
            else:  # moved to the tail with room to grow, so that the copies amortise
                self.keys[:, self.tail : self.tail + run.size] = self.keys[:, run.start : run.start + run.size]
                run.start, run.room = self.tail, 2 * (run.size + n)
                self.tail += run.room
        at = run.start + run.size
        self.keys[:, at : at + n] = keys.transpose(0, 1)
        run.size += n

    def _reserve(self, n: int) -> None:
        """Make room for n rows at the tail, if need be in a new tensor: another thread may still search the old one."""
        if self.tail + n <= self.keys.shape[1]:
            return
        used = sum(run.size for run in self.runs.values())
        heads, _, dim = self.keys.shape
        if 2 * used < self.tail:  # mostly holes: pack the runs instead of copying the holes along
            packed = self.keys.new_empty(heads, used + used // 2 + n, dim)
            self.tail = 0
            for run in sorted(self.runs.values(), key=lambda run: run.start):
                packed[:, self.tail : self.tail + run.size] = self.keys[:, run.start : run.start + run.size]
                run.start, run.room = self.tail, run.size
                self.tail += run.size
        else:
            packed = self.keys.new_empty(heads, self.tail + max(self.tail // 2, n, 64), dim)
            packed[:, : self.tail] = self.keys[:, : self.tail]
        self.keys = packed

    def remove(self, document: int) -> None:
        run = self.runs.pop(document, None)
        if run is not None and run.start + run.room == self.tail:
            self.tail = run.start

    def truncate(self, document: int, blocks: int) -> None:
        run = self.runs.get(document)
        if run is not None:
            run.size = max(0, min(run.size, blocks - run.first_block))
            if run.size == 0:
                self.remove(document)

    def trim(self, document: int, first_block: int) -> None:
        run = self.runs.get(document)
        if run is None or first_block <= run.first_block:
            return
        gone = first_block - run.first_block
        if gone >= run.size:
            self.remove(document)
        else:
            run.first_block, run.start, run.size, run.room = (
                first_block,
                run.start + gone,
                run.size - gone,
                run.room - gone,
            )


class PackedIndex:
    """Exact search by one matrix product over packed landmark keys; ties go to the newer block.

    Keys are held in `dtype` (float32: a half-precision product is slower on a CPU, and landmark keys are 1/64 of the
    KV).
    """

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        self._shape = (num_kv_heads, head_dim, dtype)
        self._layers: dict[int, _PackedLayer] = {}
        self._lock = threading.Lock()
        self.searches = 0
        self.rows = 0

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        with self._lock:
            packed = self._layers.get(layer)
            if packed is None:
                packed = self._layers[layer] = _PackedLayer(*self._shape)
            _expect_next(packed.runs.get(document), document, layer, first_block)
            packed.add(document, first_block, keys)

    def remove(self, document: int) -> None:
        with self._lock:
            for packed in self._layers.values():
                packed.remove(document)

    def truncate(self, document: int, blocks: int) -> None:
        with self._lock:
            for packed in self._layers.values():
                packed.truncate(document, blocks)

    def trim(self, document: int, first_block: int, layer: int | None = None) -> None:
        with self._lock:
            for number, packed in self._layers.items():
                if layer is None or number == layer:
                    packed.trim(document, first_block)

    def span(self, document: int, layer: int) -> tuple[int, int]:
        with self._lock:
            packed = self._layers.get(layer)
            run = packed.runs.get(document) if packed else None
            return (run.first_block, run.first_block + run.size) if run else (0, 0)

    def documents(self) -> set[int]:
        with self._lock:
            return {document for packed in self._layers.values() for document in packed.runs}

    def search(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        kv_heads: Sequence[int] | None = None,
    ) -> Hits:
        keys, ranges = self._resolve(layer, scope)
        self.searches += 1
        self.rows += _rows_of(q, keys.shape[0], kv_heads)
        found = landmark_topk(q, keys, ranges, top_k, return_lse=return_lse, kv_heads=kv_heads)
        return Hits(found.scores, _rows_to_candidates(found.rows, ranges), found.lse)

    def keys(self, layer: int, scope: Scope) -> Tensor:
        keys, ranges = self._resolve(layer, scope)
        if len(ranges) == 1:
            return keys[:, ranges[0][0] : ranges[0][1]]
        return torch.cat([keys[:, :0], *(keys[:, start:end] for start, end in ranges)], dim=1)

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        keys, ranges = self._resolve(layer, scope)
        return _gather(keys, ranges, candidates)

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(packed.keys.nbytes for packed in self._layers.values())

    def _resolve(self, layer: int, scope: Scope) -> tuple[Tensor, list[tuple[int, int]]]:
        """The layer's tensor as it is now and the scope's rows in it; rows only ever move into new places."""
        with self._lock:
            packed = self._layers.get(layer)
            if packed is None:
                return torch.empty(self._shape[0], 0, self._shape[1], dtype=self._shape[2]), _ranges({}, layer, scope)
            return packed.keys, _ranges(packed.runs, layer, scope)


def _gather(keys: Tensor, ranges: list[tuple[int, int]], candidates: Tensor) -> Tensor:
    if not ranges:
        return keys.new_zeros(*candidates.shape, keys.shape[-1])
    rows = _candidates_to_rows(candidates, ranges)
    kv_heads = torch.arange(keys.shape[0], device=keys.device).repeat_interleave(candidates.shape[0] // keys.shape[0])
    return keys[kv_heads.view(-1, *[1] * (rows.dim() - 1)), rows]  # (H, ..., D)


class _FaissLayer:
    """One layer in FAISS: an IndexFlatIP a KV head, all with the same rows; a document may lie in several runs."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.heads = [_faiss().IndexFlatIP(head_dim) for _ in range(num_kv_heads)]
        self.runs: dict[int, list[_Run]] = {}

    @property
    def size(self) -> int:
        return int(self.heads[0].ntotal)

    def end(self, document: int) -> _Run | None:
        """All runs of a document as one, for the order check."""
        runs = self.runs.get(document)
        return _Run(runs[0].first_block, 0, sum(run.size for run in runs), 0) if runs else None

    def add(self, document: int, first_block: int, keys: Tensor) -> None:
        rows = keys.to(torch.float32).transpose(0, 1).contiguous().numpy()
        runs = self.runs.setdefault(document, [])
        if runs and runs[-1].start + runs[-1].size == self.size:
            runs[-1].size += keys.shape[0]
        else:
            runs.append(_Run(first_block, self.size, keys.shape[0], keys.shape[0]))
        for index, head_rows in zip(self.heads, rows):
            index.add(head_rows)

    def keep(self, document: int, first: int, end: int) -> None:
        """Drop the document's blocks outside [first, end); the rows behind them move up."""
        faiss = _faiss()
        for run in reversed(
            self.runs.get(document, [])
        ):  # from the last row down, so that earlier rows stay where they are
            low = min(max(first, run.first_block), run.first_block + run.size)
            high = max(low, min(end, run.first_block + run.size))
            for start, stop in ((high, run.first_block + run.size), (run.first_block, low)):
                gone = stop - start
                if gone <= 0:
                    continue
                row = run.start + start - run.first_block
                for index in self.heads:
                    index.remove_ids(faiss.IDSelectorRange(row, row + gone))
                for other in (r for runs in self.runs.values() for r in runs):
                    if other.start > row:
                        other.start -= gone
            run.first_block, run.size = low, high - low
        kept = [run for run in self.runs.get(document, []) if run.size]
        self.runs.pop(document, None)
        if kept:
            self.runs[document] = kept

    def ranges(self, layer: int, scope: Scope) -> list[tuple[int, int]]:
        found = []
        for document, first, end in scope:
            runs = self.runs.get(document, [])
            whole = {document: _Run(runs[0].first_block, 0, sum(r.size for r in runs), 0)} if runs else {}
            if not _ranges(whole, layer, [(document, first, end)]):
                continue
            for run in runs:
                low, high = max(first, run.first_block), min(end, run.first_block + run.size)
                if low < high:
                    offset = run.start - run.first_block
                    found.append((low + offset, high + offset))
        return found

    def keys(self) -> Tensor:
        """All rows, [Hkv, N, D], copied."""
        return torch.stack([torch.from_numpy(index.reconstruct_n(0, index.ntotal)) for index in self.heads])


class FaissFlatIndex:
    """The same search by FAISS, one IndexFlatIP for each (layer, KV head), with selectors for scopes. Keys are float32.

    Between equal scores FAISS promises no order. The log-sum-exp over all candidates is computed beside it.
    """

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        _faiss()
        self._shape = (num_kv_heads, head_dim)
        self._layers: dict[int, _FaissLayer] = {}
        self._lock = threading.Lock()
        self.searches = 0
        self.rows = 0

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        with self._lock:
            flat = self._layers.get(layer)
            if flat is None:
                flat = self._layers[layer] = _FaissLayer(*self._shape)
            _expect_next(flat.end(document), document, layer, first_block)
            flat.add(document, first_block, keys)

    def remove(self, document: int) -> None:
        with self._lock:
            for flat in self._layers.values():
                flat.keep(document, 0, 0)

    def truncate(self, document: int, blocks: int) -> None:
        with self._lock:
            for flat in self._layers.values():
                flat.keep(document, -(1 << 62), blocks)

    def trim(self, document: int, first_block: int, layer: int | None = None) -> None:
        with self._lock:
            for number, flat in self._layers.items():
                if layer is None or number == layer:
                    flat.keep(document, first_block, 1 << 62)

    def span(self, document: int, layer: int) -> tuple[int, int]:
        with self._lock:
            run = self._layers[layer].end(document) if layer in self._layers else None
            return (run.first_block, run.first_block + run.size) if run else (0, 0)

    def documents(self) -> set[int]:
        with self._lock:
            return {document for flat in self._layers.values() for document in flat.runs}

    def search(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        kv_heads: Sequence[int] | None = None,
    ) -> Hits:
        with self._lock:  # FAISS forbids adding while searching
            flat = self._layers.get(layer)
            ranges = flat.ranges(layer, scope) if flat else _ranges({}, layer, scope)
            self.searches += 1
            self.rows += _rows_of(q, len(flat.heads) if flat else q.shape[0], kv_heads)
            if flat is None or not ranges or q.shape[1] == 0:
                return _no_hits(q, top_k, return_lse)
            grouped = q.to(torch.float32).reshape(len(flat.heads), -1, q.shape[-1]).contiguous()
            options = _selector(ranges, flat.size)
            nothing = (
                np.full((grouped.shape[1], top_k), NEG, "float32"),
                np.full((grouped.shape[1], top_k), -1, "int64"),
            )
            found = [
                index.search(rows.numpy(), top_k, params=options) if kv_heads is None or head in kv_heads else nothing
                for head, (index, rows) in enumerate(zip(flat.heads, grouped))
            ]
            keys = flat.keys() if return_lse else None
        scores = torch.stack([torch.from_numpy(head_scores) for head_scores, _ in found]).view(*q.shape[:2], top_k)
        rows = torch.stack([torch.from_numpy(head_rows) for _, head_rows in found]).view(*q.shape[:2], top_k)
        lse = None
        if keys is not None:
            lse = landmark_topk(q.to(torch.float32), keys, ranges, 1, return_lse=True).lse
        return Hits(scores.masked_fill(rows < 0, NEG), _rows_to_candidates(rows, ranges), lse)

    def keys(self, layer: int, scope: Scope) -> Tensor:
        keys, ranges = self._resolve(layer, scope)
        return torch.cat([keys[:, :0], *(keys[:, start:end] for start, end in ranges)], dim=1)

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        keys, ranges = self._resolve(layer, scope)
        return _gather(keys, ranges, candidates)

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(4 * flat.size * self._shape[0] * self._shape[1] for flat in self._layers.values())

    def _resolve(self, layer: int, scope: Scope) -> tuple[Tensor, list[tuple[int, int]]]:
        with self._lock:
            flat = self._layers.get(layer)
            if flat is None:
                return torch.empty(self._shape[0], 0, self._shape[1]), _ranges({}, layer, scope)
            return flat.keys(), flat.ranges(layer, scope)


def _faiss() -> Any:
    """FAISS, imported where it is used. Raises InvalidInput, which says how to get it."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidInput(
            "the faiss-flat index needs FAISS: pip install 'memstore[cpu]', or choose the packed index"
        ) from error
    return faiss


def _selector(ranges: list[tuple[int, int]], size: int) -> Any:
    """FAISS search parameters that admit only these rows; None when that is every row."""
    faiss = _faiss()
    if len(ranges) == 1:
        start, end = ranges[0]
        return None if (start, end) == (0, size) else faiss.SearchParameters(sel=faiss.IDSelectorRange(start, end))
    allowed = np.zeros(size, dtype=bool)
    for start, end in ranges:
        allowed[start:end] = True
    return faiss.SearchParameters(sel=faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little")))
