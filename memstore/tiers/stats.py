"""What the tiers count: lookups, reads and prefetches, by tier and layer."""

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TierStats:
    """Lookups of one tier, or of one layer in one tier, since it was opened.

    Every unit a lookup asks for is a hit or a miss. `prefetched` and `late` are parts of the hits;
    a unit that another lookup is reading is a hit too, for it is read once. So what was read from
    below is the misses, and what was prefetched.
    """

    hits: int = 0  # units that were here, or on their way
    misses: int = 0  # units that this lookup had to fetch from below
    bytes: int = 0  # decoded bytes delivered
    # upper tiers: time that lookups waited for the tier below; disk: time spent on reading
    seconds: float = 0.0
    evictions: int = 0  # units dropped to make room
    prefetched: int = 0  # first lookups of a unit that a prefetch had brought in time
    late: int = 0  # first lookups of a unit that had to wait for its prefetch
    unused: int = 0  # prefetched units that went again before anything looked them up

    def __add__(self, other: "TierStats") -> "TierStats":
        return TierStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def difference(self, earlier: "TierStats") -> "TierStats":
        """What was counted since `earlier`, a snapshot of the same tier."""
        return TierStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int | float]:
        """The counts by name, as plain numbers."""
        return asdict(self)


COUNTS = tuple(field.name for field in fields(TierStats))


class TierCounter:
    """Counts a tier's lookups by layer; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[int, dict[str, Any]] = {}

    def count(self, layer: int, **counts: float) -> None:
        """Add to the counts of one layer; the names are those of TierStats."""
        with self._lock:
            of_layer = self._layers.get(layer)
            if of_layer is None:
                of_layer = self._layers[layer] = dict(asdict(TierStats()))
            for name, amount in counts.items():
                of_layer[name] += amount

    def layers(self) -> dict[int, TierStats]:
        """A snapshot by layer."""
        with self._lock:
            return {layer: TierStats(**counts) for layer, counts in sorted(self._layers.items())}

    def snapshot(self) -> TierStats:
        """A snapshot over all layers."""
        return sum(self.layers().values(), TierStats())
