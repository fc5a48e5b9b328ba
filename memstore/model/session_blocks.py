"""The blocks that a session may read: attached documents and its own text, oldest first."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from memstore.model.rotary import Prefix

Run = tuple[int, int, int]
"""Blocks first .. end of a document: (document, first, end)."""


@dataclass
class SessionBlocks:
    """What a session remembers, oldest first: attached documents, then its own blocks, under an id
    of the store.
    """

    documents: list[tuple[int, int]] = field(default_factory=list)  # (document id, blocks)
    own_document: int | None = None
    own_first: int = 0  # own blocks before this one were let go
    own_end: int = 0

    @property
    def own(self) -> int:
        """How many blocks of its own the session has."""
        return self.own_end - self.own_first

    @property
    def count(self) -> int:
        """How many blocks there are in all."""
        return sum(blocks for _, blocks in self.documents) + self.own

    def runs(self, end: int) -> tuple[Run, ...]:
        """The `end` oldest blocks."""
        runs = [(document, 0, blocks) for document, blocks in self.documents if blocks]
        if self.own_document is not None and self.own:
            runs.append((self.own_document, self.own_first, self.own_end))
        kept, left = [], end
        for document, first, last in runs:
            take = min(left, last - first)
            if take > 0:
                kept.append((document, first, first + take))
            left -= take
        return tuple(kept)


class Candidates:
    """The blocks that a chunk may read, as they are when it begins; a candidate is a block's
    number, 0 = the oldest.

    prefix: where they stand; documents: how many are blocks of attached documents, the oldest; old:
    runs of the old ones; fading: what is added to the scores of old ones for their age, [old], or
    None. Attached documents have no age. That of an own block is how many came after it, itself
    included; the recent ones are top_k or younger.
    """

    def __init__(
        self,
        blocks: SessionBlocks,
        *,
        top_k: int,
        fixed: bool,
        recency: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.prefix = Prefix.of(blocks.count, blocks.own, top_k, fixed)
        self.documents = blocks.count - blocks.own
        self.old = blocks.runs(self.prefix.old)
        self._runs = blocks.runs(self.prefix.blocks)
        lengths = [end - first for _, first, end in self._runs]
        self._starts = [0, *accumulate(lengths)][: len(lengths)]
        self.fading: Tensor | None = None
        old_own = self.prefix.old - self.documents
        if recency and old_own > 0:
            age = torch.arange(blocks.own, blocks.own - old_own, -1, dtype=dtype)
            fading = -recency * (age / top_k).log()
            self.fading = torch.nn.functional.pad(fading, (self.prefix.old - old_own, 0)).to(device)

    def locate(self, candidate: int) -> tuple[int, int]:
        """(document, block) of a candidate."""
        run = bisect_right(self._starts, candidate) - 1
        document, first, _ = self._runs[run]
        return document, first + candidate - self._starts[run]
