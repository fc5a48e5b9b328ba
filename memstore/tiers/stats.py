"""Counts of a tier's lookups, reads and prefetches."""

import threading
from dataclasses import dataclass, fields, replace


@dataclass
class TierStats:
    """Lookups of one tier since it was opened.

    Every unit of a lookup is a hit or a miss. `prefetched` and `late` are parts of the hits; a unit
    that another lookup is reading is a hit, too. So misses and prefetches are the reads from below.
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

    def add_lookup(self, units: int, missing: int, waited: float, bytes: int) -> None:
        """Count a lease: units looked up, distinct ones missing, seconds waited, bytes decoded."""
        self.hits += units - missing
        self.misses += missing
        self.bytes += bytes
        self.seconds += waited


COUNTS = tuple(field.name for field in fields(TierStats))


class TierCounter:
    """Counts a tier's lookups, and its failed reads by reason. Safe for several threads.

    A count replaces `stats` or `failures` and never changes them, so that a caller may hold both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stats = TierStats()
        self.failures: dict[str, int] = {}

    def failed(self, reason: str) -> None:
        """Count a failed read, by reason; it is neither a hit nor a miss."""
        with self._lock:
            self.failures = self.failures | {reason: self.failures.get(reason, 0) + 1}

    def count(
        self, *, hits: int = 0, misses: int = 0, bytes: int = 0, seconds: float = 0.0
    ) -> None:
        """Add to the counts."""
        with self._lock:
            now = self.stats
            self.stats = replace(
                now,
                hits=now.hits + hits,
                misses=now.misses + misses,
                bytes=now.bytes + bytes,
                seconds=now.seconds + seconds,
            )
