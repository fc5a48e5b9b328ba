"""Batched decode: tokens that several answers have given and not read yet go through the model in
one forward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from memstore.model.batched_forward import read_pending
from memstore.serve.answering.answers import Answer


def decode_batch(works: Sequence[Iterator[Any]]) -> None:
    """Read what the answers among these works have pending, where the first of them does. For
    Worker.
    """
    going = [work.continuation for work in works if isinstance(work, Answer)]
    others = [one for one in going[1:] if one is not None]
    first = going[0] if going and isinstance(works[0], Answer) else None
    if first is not None and first.pending is not None and others:
        read_pending([first, *others])
