"""Recorded lookups, as a replay takes them, and how soon they ask for the same units again."""

from dataclasses import dataclass
from pathlib import Path

from memstore.block import BlockKey
from memstore.errors import InvalidInput
from memstore.tiers.lookup_trace import read_trace

REUSE_WITHIN = (1, 2, 4, 8, 16, 32, 64)  # lookups of a layer


@dataclass(frozen=True)
class Recorded:
    """The lookups of a trace, and aligned with them what was predicted since the lookup before.

    Blocks of sessions' own are left out: they are pinned, so no policy decides about them.
    """

    requests: list[list[BlockKey]]
    predicted: list[list[BlockKey]]

    @classmethod
    def load(cls, trace: Path) -> "Recorded":
        """Raises InvalidInput for a file that is no trace or holds no lookup."""
        requests: list[list[BlockKey]] = []
        predicted: list[list[BlockKey]] = []
        ahead: list[BlockKey] = []
        for entry in read_trace(trace):
            units = [unit for unit in entry.units if unit.document >= 0]
            if not entry.is_lookup:
                ahead += units
            elif units:
                requests.append(units)
                predicted.append(ahead)
                ahead = []
        if not requests:
            raise InvalidInput(f"{trace} holds no lookup of stored blocks")
        return cls(requests, predicted)

    @property
    def units(self) -> int:
        """Distinct units that were looked up."""
        return len({unit for request in self.requests for unit in request})

    def ahead(self, prefetch: str) -> list[list[BlockKey]]:
        """What is predicted before each lookup: "off" (nothing) or "recorded" (as it was)."""
        return self.predicted if prefetch == "recorded" else []

    def reuse(self) -> dict[int, dict[int, float]]:
        """{layer: {n: share}}: of the units that a layer read, those that one of its last n lookups
        read as well.
        """
        found: dict[int, dict[int, float]] = {}
        for layer in sorted({request[0].layer for request in self.requests}):
            lookups = [request for request in self.requests if request[0].layer == layer]
            last: dict[BlockKey, int] = {}
            ages: list[int] = []
            for number, units in enumerate(lookups):
                ages += [number - last[unit] for unit in units if unit in last]
                last.update(dict.fromkeys(units, number))
            asked = sum(map(len, lookups))
            found[layer] = {
                n: round(sum(age <= n for age in ages) / asked, 4) for n in REUSE_WITHIN
            }
        return found
