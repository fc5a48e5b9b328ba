"""What the tiers share: where misses are read from, a lease on slots, and counted lookups."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from memstore.block import BlockKey


class UnitSource(Protocol):
    """What an upper tier reads its misses from."""

    def read(self, units: Sequence[BlockKey], out_k: Tensor, out_v: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of both slabs with unit `units[i]`; return each unit's valid content tokens.

        out_k, out_v: CPU slabs [S, block_size, head_dim] in the KV dtype. Rows of a slot at and after the returned
        length are zero. Units may come in any order; no two may name one slot. When an error is raised, the named
        slots hold nothing of use.

        Raises CorruptBlock (the message names the unit's record) and DocumentNotFound (forgotten, or never stored).
        """
        ...


@dataclass(frozen=True)
class TierStats:
    """Lookups of one tier, or of one layer in one tier, since it was opened."""

    hits: int = 0  # units found here
    misses: int = 0  # units that had to come from below
    bytes: int = 0  # decoded bytes delivered
    seconds: float = 0.0  # time spent on delivering
    evictions: int = 0  # units dropped to make room

    def __add__(self, other: "TierStats") -> "TierStats":
        return TierStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def difference(self, earlier: "TierStats") -> "TierStats":
        """What was counted since `earlier`, a snapshot of the same tier."""
        return TierStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int | float]:
        """The counts by name, as plain numbers."""
        return asdict(self)


class TierCounter:
    """Counts a tier's lookups by layer; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[int, TierStats] = {}

    def count(
        self, layer: int, *, hits: int = 0, misses: int = 0, bytes: int = 0, seconds: float = 0.0, evictions: int = 0
    ) -> None:
        """Add to the counts of one layer."""
        with self._lock:
            self._layers[layer] = self._layers.get(layer, TierStats()) + TierStats(
                hits, misses, bytes, seconds, evictions
            )

    def layers(self) -> dict[int, TierStats]:
        """A snapshot by layer."""
        with self._lock:
            return dict(sorted(self._layers.items()))

    def snapshot(self) -> TierStats:
        """A snapshot over all layers."""
        return sum(self.layers().values(), TierStats())


@dataclass
class Lease:
    """Slots that hold the requested units and are not evicted until `release` (or the end of the `with` block).

    slots, lengths: int64 [n], aligned with the requested units; missed: bool [n], units that came from the tier below;
    k, v: slabs [S, block_size, head_dim] to index with slots; a unit's rows at and after its length are
    zero.
    """

    slots: Tensor
    lengths: Tensor
    missed: Tensor
    k: Tensor
    v: Tensor
    on_release: Callable[[], None] = field(repr=False)
    released: bool = False

    def release(self) -> None:
        """Give the slots back; more than once is the same as once."""
        if not self.released:
            self.released = True
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
