"""The interface of a source that misses are read from, and a lease on slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.tiers.stats import TierCounter


class UnitSource(Protocol):
    """A source that an upper tier reads its misses from."""

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of the slab with unit `units[i]`; return each unit's valid content
        tokens.

        slab: [S, 2, block_size, head_dim] in the KV dtype, K before V, of a CPU tier for the disk
        below it. Rows of a slot at and after the returned length are zero. Units come in any order;
        no two may have the same slot. After an error the contents of the slots are undefined.

        Raises CorruptBlock (the message names the unit's record) and DocumentNotFound (forgotten,
        or never stored).
        """
        ...


class LowestTier(UnitSource, Protocol):
    """A source that is a tier, or several below each other, and counts."""

    @property
    def counters(self) -> Mapping[str, TierCounter]:
        """The counts of its tiers by name, top first."""
        ...

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """As `read`; of each unit also the name of the tier that had it."""
        ...

    def close(self) -> None:
        """End its threads; idempotent."""
        ...


@dataclass
class Lease:
    """Slots that hold the requested units and are not evicted until `release` (or the end of the
    `with` block).

    held: of each requested unit its slot; tier: the name of the tier whose slots they are; fetched:
    of the slots that this lease had to fill, the name of the tier that had the unit; k, v: slabs
    [S, block_size, head_dim] to index with slots, views of one in which K and V of a slot are
    neighbours; a unit's rows at and after its length are zero; slot_lengths: int64 [S], the
    lengths. The slabs may be on a device, the rest is not.
    """

    held: Sequence[int]
    tier: str
    fetched: Mapping[int, str]
    k: Tensor
    v: Tensor
    slot_lengths: Tensor
    on_release: Callable[[], None] = field(repr=False)
    released: bool = False

    @cached_property
    def slots(self) -> Tensor:
        """int64 [n], the slots."""
        return torch.tensor(self.held, dtype=torch.int64)

    def contents(self) -> tuple[Tensor, Tensor]:
        """K and V [n, block_size, head_dim] of the units, copied, where the slabs are."""
        there = self.slots.to(self.k.device)
        return self.k.index_select(0, there), self.v.index_select(0, there)

    @property
    def lengths(self) -> Tensor:
        """int64 [n], valid content tokens of each unit."""
        return self.slot_lengths[self.slots]

    @property
    def tiers(self) -> list[str]:
        """Of each requested unit the tier that had it."""
        return [self.fetched.get(slot, self.tier) for slot in self.held]

    def release(self) -> None:
        """Give the slots back; idempotent."""
        if not self.released:
            self.released = True
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
