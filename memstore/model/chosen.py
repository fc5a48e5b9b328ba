"""Which tokens of which blocks a question reads: the blocks that its scores mean, and a margin
beside those near whose end it was found.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from memstore.index.base import Scope
from memstore.model.selectors import Found, Selector, choose
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped

_NEAR = 16  # tokens from a block's end: what is found there may go on beyond it


class Chosen(NamedTuple):
    """A block that is read."""

    document: int
    block: int
    score: float
    first: int = 0  # of its tokens, those from here
    end: int | None = None  # up to here are read; None = all


def meant(
    scores: Tensor,
    selector: Selector,
    tapped: Tapped,
    store: Found,
    scope: Scope,
    settings: LookupSettings,
    block_size: int,
) -> list[Chosen]:
    """The blocks that scores [blocks of the scope] mean, in the order of the text.

    A margin of settings.margin tokens is read of a block's neighbour in its document where what was
    tapped was found near that end, and on both sides where the selector does not know where.
    """
    spread = math.inf if settings.score_range is None else settings.score_range
    candidates = choose(scores, settings.top_k, spread).tolist()
    blocks = [_place(scope, candidate)[:2] for candidate in candidates]
    places = selector.places(tapped, store, [(document, at, at + 1) for document, at in blocks])
    whole = [(0, block_size - 1)] * len(candidates)
    found = dict(zip(candidates, whole if places is None else places.tolist()))
    tokens: dict[int, tuple[int, int]] = {}
    for candidate, first, end in _margins(found, scope, settings.margin, block_size):
        begun, ended = tokens.get(candidate, (first, end))
        tokens[candidate] = min(begun, first), max(ended, end)
    tokens |= dict.fromkeys(candidates, (0, block_size))
    return [
        Chosen(*_place(scope, candidate)[:2], float(scores[candidate]), first, end)
        for candidate, (first, end) in sorted(tokens.items())
    ]


def _margins(
    found: Mapping[int, tuple[int, int]], scope: Scope, margin: int, size: int
) -> Iterator[tuple[int, int, int]]:
    """Candidates beside those found, and the tokens [first, end) to read of each. found: by
    candidate, the first and last token by which it was.
    """
    margin = min(margin, size)
    for candidate, (begun, ended) in found.items() if margin else ():
        run = _place(scope, candidate)[2]
        if candidate - 1 in run and begun < _NEAR:
            yield candidate - 1, size - margin, size
        if candidate + 1 in run and ended >= size - _NEAR:
            yield candidate + 1, 0, margin


def _place(scope: Scope, candidate: int) -> tuple[int, int, range]:
    """Document and block of a candidate, and the candidates of its run of the scope."""
    end = 0
    for document, begin, stop in scope:
        first, end = end, end + stop - begin
        if candidate < end:
            return document, begin + candidate - first, range(first, end)
    raise IndexError(candidate)
