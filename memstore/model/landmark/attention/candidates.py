"""The blocks that a chunk may read, and the slots where those before it stand."""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.model.session_blocks import SessionBlocks


@dataclass(frozen=True)
class Prefix:
    """The slots before a chunk for a memory of `blocks` blocks, the last `recent` of them recent
    (docs/appendix/method.md section 4).

    size: prefix slots of block_size + 1 positions each; the chunk starts behind them. Stingy
    mapping gives old blocks slots from the left; a fixed distance gives them none. Chosen recent
    blocks take the right-most slots in order.
    """

    blocks: int
    recent: int
    size: int

    @classmethod
    def of(cls, blocks: int, own: int, top_k: int, fixed: bool) -> "Prefix":
        """The prefix for `blocks` blocks of which the last `own` are the session's own."""
        recent = min(own, top_k)
        return cls(blocks, recent, recent if fixed else min(blocks, top_k + 1))

    @property
    def old(self) -> int:
        """How many blocks are old."""
        return self.blocks - self.recent


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
        self.documents = blocks.attached
        self.old = blocks.runs(self.prefix.old)
        self._runs = blocks.runs(self.prefix.blocks)
        self._starts = blocks.starts
        self.fading: Tensor | None = None
        old_own = self.prefix.old - self.documents
        if recency and old_own > 0:
            age = torch.arange(blocks.own, blocks.own - old_own, -1, dtype=dtype)
            fading = -recency * (age / top_k).log()
            self.fading = torch.nn.functional.pad(fading, (self.prefix.old - old_own, 0)).to(device)

    def locate(self, candidate: int) -> tuple[int, int]:
        """(document, block) of a candidate."""
        if candidate >= self.documents:
            document, first, _ = self._runs[-1]
            return document, first + candidate - self.documents
        run = bisect_right(self._starts, candidate) - 1
        return self._runs[run][0], candidate - self._starts[run]
