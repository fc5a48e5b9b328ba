"""Counts of lookups, reads and prefetches, by tier and layer."""

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from memstore.block import BlockKey


@dataclass(frozen=True)
class TierStats:
    """Lookups of one tier, or of one layer in one tier, since it was opened.

    Every unit of a lookup is a hit or a miss. `prefetched` and `late` are parts of the hits; a unit
    that another lookup is reading is a hit too. So misses and prefetches were read from below.
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

    def to_dict(self) -> dict[str, int | float]:
        """The counts by name, as plain numbers."""
        return dict(vars(self))


COUNTS = tuple(field.name for field in fields(TierStats))
HITS, MISSES, BYTES, SECONDS, EVICTIONS, PREFETCHED, LATE, UNUSED = range(len(COUNTS))
"""Places in a layer's counts."""


class LayerCounts:
    """The fields of TierStats by layer, to be counted by whoever holds the tier's lock."""

    def __init__(self) -> None:
        self._layers: dict[int, list[float]] = {}

    def of(self, layer: int) -> list[float]:
        """The counts of a layer, to be added to at once, in the order of the fields."""
        return self._layers.setdefault(layer, [0.0] * len(COUNTS))

    def lookups(
        self,
        units: Sequence[BlockKey],
        missing: Collection[BlockKey],
        waited: float,
        unit_bytes: int,
    ) -> None:
        """One lease: its units, the distinct ones that were missing, and the seconds it waited."""
        if not units:
            return
        # a step asks for one layer at a time; a session that chooses once, for all
        missed = Counter([unit.layer for unit in missing])
        for layer, asked in Counter([unit.layer for unit in units]).items():
            counts = self.of(layer)
            counts[HITS] += asked - missed[layer]
            counts[MISSES] += missed[layer]
            counts[BYTES] += asked * unit_bytes
        self.of(units[0].layer)[SECONDS] += waited

    def layers(self) -> dict[int, TierStats]:
        """A snapshot by layer."""
        return {layer: _as_stats(counts) for layer, counts in sorted(self._layers.items())}

    def total(self) -> TierStats:
        """A snapshot over all layers."""
        every = [[0.0] * len(COUNTS), *self._layers.values()]
        return _as_stats([sum(counts) for counts in zip(*every)])


def _as_stats(counts: Sequence[float]) -> TierStats:
    hits, misses, size, seconds, *events = counts
    return TierStats(int(hits), int(misses), int(size), seconds, *map(int, events))


class TierCounter:
    """Counts a tier's lookups by layer; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = LayerCounts()
        self._failures: Counter[str] = Counter()

    def failed(self, reason: str, count: int = 1) -> None:
        """Count failed reads, by reason; they are neither hits nor misses."""
        with self._lock:
            self._failures[reason] += count

    def failures(self) -> dict[str, int]:
        """How many reads failed, by reason."""
        with self._lock:
            return dict(self._failures)

    def count(self, layer: int, **counts: float) -> None:
        """Add to the counts of one layer; the names are those of TierStats."""
        with self._lock:
            of_layer = self._counts.of(layer)
            for name, amount in counts.items():
                of_layer[COUNTS.index(name)] += amount

    def layers(self) -> dict[int, TierStats]:
        """A snapshot by layer."""
        with self._lock:
            return self._counts.layers()

    def snapshot(self) -> TierStats:
        """A snapshot over all layers."""
        with self._lock:
            return self._counts.total()
