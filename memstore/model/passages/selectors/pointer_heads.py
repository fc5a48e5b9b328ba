"""Pointer heads: the few query heads of a model that, untrained, look at what a question is about.

`memstore.training.selectors.head_ranking` finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memstore.disk.format.index_spec import IndexSpec
from memstore.index.scope import Scope
from memstore.model.passages.selectors.captured_activations import Captured, Captures
from memstore.model.passages.selectors.selector import Found

Rotate = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, x [..., T, D], positions [T]) -> x rotated to these positions, as the layer's own
attention does.
"""

DISTANCE = 256  # positions that a question is seen from


class PointerHeads:
    """score(B) = mean over heads and the question's tokens i of softmax over B of s_iB, with
    s_iB = max over tokens j of B, from its first on, of <R(256) q_i, R(j) k_j> / sqrt(D).
    """

    def __init__(
        self, heads: Sequence[tuple[int, int]], shape: tuple[int, int, int], rotate: Rotate
    ) -> None:
        """heads: (layer, query head). shape: the model's query heads, KV heads, head width."""
        query_heads, kv_heads, self._width = shape
        self.heads = tuple(heads)
        self._group = query_heads // kv_heads
        self._rotate = rotate
        kept = dict.fromkeys((layer, head // self._group) for layer, head in self.heads)
        self._kept = {pair: number for number, pair in enumerate(kept)}
        self._form = IndexSpec(
            "pointer heads",
            hashlib.blake2b(repr(list(kept)).encode(), digest_size=16).hexdigest(),
            len(self._kept),
            self._width,
            "float16",
            words=False,
        )

    @property
    def spec(self) -> IndexSpec:
        return self._form

    @property
    def captures(self) -> Captures:
        return Captures(heads=tuple(sorted({layer for layer, _ in self.heads})))

    def landmarks(self, captured: Captured) -> Tensor:
        """float16 [T, KV heads kept, D], rotated by the token's offset in its passage."""
        offsets = torch.arange(len(captured.ids))
        kept = []
        for layer, head in self._kept:
            k = captured.k[layer][head]
            kept.append(self._rotate(layer, k, offsets.to(k.device)).half())
        return torch.stack(kept, dim=1).cpu()

    def words(self, text_of_block: Sequence[str]) -> None:
        return None

    def scores(self, captured: Captured, question: str, store: Found, scope: Scope) -> Tensor:
        """float32 [blocks of the scope], shares of 1."""
        positions = torch.full((len(captured.ids),), DISTANCE)
        total: Tensor | None = None
        for layer, head in self.heads:
            q = captured.q[layer][head]
            q = self._rotate(layer, q, positions.to(q.device)).float().cpu()
            number = self._kept[layer, head // self._group]
            found = store.token_maxima(q * self._width**-0.5, number, scope)
            share = found.softmax(-1).mean(0) / len(self.heads)
            total = share if total is None else total + share
        assert total is not None
        return total

    def rows(self, captured: Captured) -> None:
        return None

    def beside(self, question: str) -> None:
        return None

    def adds(self, captured: Captured, store: Found, scope: Scope) -> None:
        return None
