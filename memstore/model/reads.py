"""What a session has read of a memory, and how often it looked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Read(NamedTuple):
    """One unit read by the last row of a step: its attention mass, and the tier that had it."""

    layer: int
    head: int
    document: int
    block: int
    mass: float
    tier: str


OnRead = Callable[[list[Read]], None]
"""Told the units that a row of a step has read."""


@dataclass
class Lookups:
    """Lookups done, and skipped: of (token, head, layer) because the gate was below the cutoff; of
    questions, by a model that chooses once for each. left: units that were chosen and not waited
    for (a cutoff by tier).
    """

    done: int = 0
    skipped: int = 0
    left: int = 0
