"""Exact search: all landmark keys of a layer in one tensor, one product for all KV heads."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.index.block_rows import ALL_BLOCKS, Layer, Ranges, Scope, to_rows
from memstore.kernels.api import Hits, landmark_topk
from memstore.kernels.reference import accumulate


@dataclass(frozen=True)
class Lookup:
    """A search whose settings were checked, and the rows it is about."""

    layer: int
    q: Tensor  # (H, T, D) in float32 at least
    scope: Scope
    top_k: int
    return_lse: bool
    open_rows: Tensor | None
    bias: Tensor | None
    kv_heads: list[int] | None  # that have rows to search; None = all
    packed: Layer  # the keys as they are now
    ranges: Ranges  # of the scope in them


class PackedIndex:
    """Landmark keys of many documents, one namespace a layer, searched exactly by one matrix
    product over all of them. Safe for several threads.
    """

    kind = "packed"

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """An empty index of keys [.., num_kv_heads, head_dim], held in `dtype` on `device`."""
        self._shape, self._dtype = (num_kv_heads, head_dim), dtype
        self.device = torch.device(device)
        self._layers: dict[int, Layer] = {}
        self._lock = threading.RLock()
        self.searches = 0  # calls of search
        self.rows = 0  # query rows (a token of one head) searched in them

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
        """Make room for that many more keys, so that adding them in pieces moves nothing."""
        with self._lock:
            self._layers.setdefault(layer, self._empty()).reserve(keys)

    def remove(self, document: int) -> None:
        """Drop every key of a document; an unknown one is no error."""
        self.trim(document, ALL_BLOCKS)

    def trim(self, document: int, first_block: int, layer: int | None = None) -> set[int]:
        """Drop the keys of blocks < first_block, in one layer or in every layer; the layers that
        had some.
        """
        changed = set()
        with self._lock:
            for number, packed in self._layers.items():
                if (layer is None or number == layer) and packed.rows.trim(document, first_block):
                    packed.scopes.clear()
                    changed.add(number)
        return changed

    def span(self, document: int, layer: int) -> tuple[int, int]:
        """The blocks [first, end) held for a document; (0, 0) if none."""
        with self._lock:
            packed = self._layers.get(layer)
            return packed.rows.span(document) if packed else (0, 0)

    @property
    def bytes(self) -> int:
        """Memory held for keys and for what is built over them."""
        with self._lock:
            return sum(packed.keys.nbytes for packed in self._layers.values())

    def describe(self) -> dict[str, Any]:
        """What searches, as plain values."""
        with self._lock:
            landmarks = {layer: packed.rows.live for layer, packed in sorted(self._layers.items())}
        return {"kind": self.kind, "landmarks": landmarks}

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
        """The top_k blocks of the scope for each row of q [H, T, D] (rotated and scaled); of equals
        the newer first.

        The scores are exact whatever the engine; an approximate one may miss a block, never
        misjudge it. With return_lse the whole search is exact, since a denominator needs every
        candidate.

        open_rows: [H, T] bool, the rows that are searched (None = all); the others may find nothing
        and are not counted. bias: [candidates of the scope] float32, added to their scores. Raises
        DocumentNotFound if the scope names blocks that are not held, InvalidInput for queries of
        another shape than the keys or top_k < 1.
        """
        q = self._checked(q, top_k)
        with self._lock:
            kv_heads = self._count(q, open_rows)
            found = self._resolve(layer, scope)
        return self._find(
            Lookup(layer, q, scope, top_k, return_lse, open_rows, bias, kv_heads, *found)
        )

    def _count(self, q: Tensor, open_rows: Tensor | None) -> list[int] | None:
        """Count a search and its rows; return the KV heads that have any (None = all)."""
        self.searches += 1
        if open_rows is None:
            self.rows += q.shape[0] * q.shape[1]
            return None
        counts = open_rows.sum(-1).view(self._shape[0], -1).sum(-1).tolist()
        self.rows += sum(counts)
        return [head for head, count in enumerate(counts) if count]

    def _find(self, lookup: Lookup) -> Hits:
        """The exact search."""
        q, bias = lookup.q, lookup.bias
        found = landmark_topk(
            q.to(self.device),
            lookup.packed.keys,
            lookup.ranges,
            lookup.top_k,
            return_lse=lookup.return_lse,
            kv_heads=lookup.kv_heads,
            bias=None if bias is None else bias.to(self.device),
        )
        if self.device == q.device:
            return found
        lse = None if found.lse is None else found.lse.to(q.device)
        return Hits(found.scores.to(q.device), found.candidates.to(q.device), lse)

    def keys(self, layer: int, scope: Scope) -> Tensor:
        """Keys [Hkv, N, D] of the N candidates of a scope; do not write to it."""
        packed, ranges = self._resolve(layer, scope)
        if len(ranges) == 1:
            return packed.keys[:, ranges[0][0] : ranges[0][1]]
        return torch.cat(
            [packed.keys[:, :0], *(packed.keys[:, start:end] for start, end in ranges)], dim=1
        )

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        """Keys [H, ..., D] of candidates [H, ...] (-1 gives some key), each query head from its KV
        head.
        """
        packed, ranges = self._resolve(layer, scope)
        return gather(packed.keys, ranges, candidates.to(self.device)).to(candidates.device)

    def _checked(self, q: Tensor, top_k: int) -> Tensor:
        """The queries, in float32 at least, so that scores are of the keys as they are held."""
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
        """The layer's keys as they are now and the scope's rows in them; rows only ever move into
        new tensors.
        """
        with self._lock:
            packed = self._layers.get(layer) or self._empty()
            ranges = packed.scopes.get(scope, lambda: packed.rows.ranges(scope))
            return Layer(packed.keys, packed.rows), ranges


def gather(keys: Tensor, ranges: Ranges, candidates: Tensor) -> Tensor:
    """Keys [H, ..., D] of candidates [H, ...] from keys [Hkv, N, D]; -1 gives some key."""
    if not ranges:
        return keys.new_zeros(*candidates.shape, keys.shape[-1])
    rows = to_rows(candidates, ranges).clamp_min(0)
    kv_heads = torch.arange(len(keys), device=keys.device).repeat_interleave(
        len(candidates) // len(keys)
    )
    return keys[kv_heads.view(-1, *[1] * (rows.dim() - 1)), rows]
