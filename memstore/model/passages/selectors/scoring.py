"""A question's scores of the blocks of a scope: of all of them, or, where it is large, of a
shortlist.
"""

from typing import NamedTuple

from torch import Tensor

from memstore.index.scope import Scope
from memstore.model.passages.selectors.captured_activations import Captured
from memstore.model.passages.selectors.selector import Found, Selector, spread_of_all
from memstore.store.memory_store import MemoryStore


class Scored(NamedTuple):
    """Scores of blocks, and what they are of."""

    scores: Tensor  # float32 [blocks of `scope`]
    scope: Scope
    store: Found  # where these blocks are looked up
    deviation: float  # standard, of the scores of all blocks of the whole scope
    blocks: int  # of the whole scope


def score_blocks(
    selector: Selector, captured: Captured, question: str, store: MemoryStore, scope: Scope
) -> Scored:
    """Score the blocks of a scope that are worth it. Raises what MemoryStore's lookups raise."""
    rows = selector.rows(captured)
    short = None if rows is None else store.shortlist(*rows, scope, selector.beside(question))
    found: Found = store
    if short is None:
        blocks = sum(end - first for _, first, end in scope)
    else:
        found, scope, blocks = short, short.scope, short.blocks
    scores = selector.scores(captured, question, found, scope)
    deviation = spread_of_all(scores, question, selector.spec, found)[1]
    return Scored(scores, scope, found, deviation, blocks)
