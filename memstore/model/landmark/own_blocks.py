"""What a session of a landmark model remembers: attached documents, and blocks of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from memstore.store.memory_store import MemoryStore

Run = tuple[int, int, int]
"""Blocks first .. end of a document: (document, first, end)."""


@dataclass
class SessionBlocks:
    """What a session remembers, oldest first: attached documents, then its own blocks, under an id
    of the store.
    """

    # (document id, blocks); others are attached by `attach`
    documents: list[tuple[int, int]] = field(default_factory=list)
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
        return self.attached + self.own

    def __post_init__(self) -> None:
        self._count()

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Remember these documents in the place of those that were attached."""
        self.documents = [*documents]
        self._count()

    def _count(self) -> None:
        """Note the attached documents that have blocks: their runs, the numbers of their first
        blocks, and how many blocks there are.
        """
        self._runs = tuple((document, 0, blocks) for document, blocks in self.documents if blocks)
        *self.starts, self.attached = [0, *accumulate(end for _, _, end in self._runs)]

    def runs(self, end: int) -> tuple[Run, ...]:
        """The `end` oldest blocks, which are those of the documents at least."""
        runs, own = self._runs, min(self.own, end - self.attached)
        if self.own_document is not None and own > 0:
            runs = (*runs, (self.own_document, self.own_first, self.own_first + own))
        return runs


class OwnBlocks:
    """Own blocks of a session beside attached documents: half of the host tier's budget at most;
    beyond that the oldest are let go, and length is never an error.
    """

    def __init__(
        self,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        per_block: int,
        *,
        least: int,
        bound: int | None,
    ) -> None:
        """documents: attached ones, as (id, blocks). per_block: KV blocks of heads of a block;
        least: blocks that are held whatever the budget says; bound: LookupSettings.own_blocks.
        """
        self.scratch = store.retrieval.session_document()
        self.blocks = SessionBlocks(documents, own_document=self.scratch.document)
        self.most = max(least, store.tiers.host.capacity // (2 * per_block))
        if bound is not None:
            self.most = min(self.most, bound)

    def make_room(self, count: int) -> None:
        """Let the oldest go, for so many more."""
        surplus = self.blocks.own + count - self.most
        if surplus > 0:
            self.blocks.own_first += surplus
            self.scratch.trim(self.blocks.own_first)

    def close(self) -> None:
        """Let them all go."""
        self.scratch.close()
