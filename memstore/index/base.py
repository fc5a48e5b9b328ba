"""What every landmark index answers: which blocks does a query want, among runs of blocks of chosen
documents.

Nothing here knows where blocks themselves are kept, or what a document is beyond its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Scope = Sequence[tuple[int, int, int]]
"""(document, first_block, end_block) runs, oldest first: the candidates of a search, numbered 0, 1,
.. in this order.
"""


@dataclass(frozen=True)
class Hits:
    """The best candidates of each query row, best first.

    scores: [H, T, top_k] float32, NEG where the scope has fewer candidates.
    candidates: [H, T, top_k] int64, number of the block in the scope (0 = its oldest), -1 where
    there are fewer. lse: [H, T] float32, logsumexp over every candidate of the scope, or None if it
    was not asked for.
    """

    scores: Tensor
    candidates: Tensor
    lse: Tensor | None


class LandmarkIndex(Protocol):
    """Landmark keys of many documents, one namespace a layer. Safe for several threads."""

    searches: int  # calls of search
    rows: int  # query rows (a token of one head) searched in them

    def add(self, document: int, layer: int, first_block: int, keys: Tensor) -> None:
        """Append keys [n, Hkv, D] of blocks first_block ..; they must follow the blocks the
        document already has.
        """

    def reserve(self, layer: int, keys: int) -> None:
        """Make room for that many more keys of every KV head, so that adding them in pieces moves
        nothing.
        """

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
        open_rows: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Hits:
        """The top_k blocks of the scope for each row of q [H, T, D] (rotated and scaled); of equals
        the newer first.

        The scores are exact whatever the engine; an approximate one may miss a block, never
        misjudge it. With return_lse the whole search is exact, since a denominator needs every
        candidate.

        open_rows: [H, T] bool, the rows that are searched (None = all); the others may find nothing
        and are not counted. bias: [candidates of the scope] float32, added to their scores; None =
        none.

        Raises DocumentNotFound if the scope names blocks that are not held, InvalidInput for
        queries of another shape than the keys or top_k < 1.
        """

    def keys(self, layer: int, scope: Scope) -> Tensor:
        """Keys [Hkv, N, D] of the N candidates of a scope; do not write to it."""

    def gather(self, layer: int, scope: Scope, candidates: Tensor) -> Tensor:
        """Keys [H, ..., D] of candidates [H, ...] (-1 gives some key), each query head from its KV
        head.
        """

    @property
    def bytes(self) -> int:
        """Memory held for keys and for what is built over them."""

    def describe(self) -> dict[str, Any]:
        """What searches, as plain values."""
