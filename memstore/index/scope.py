"""What a search over landmark keys is asked and answers: which blocks does a query want, among runs
of blocks of chosen documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
