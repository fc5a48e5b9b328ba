"""What a session has read of a memory, and how often it looked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ReadUnit(NamedTuple):
    """What a query head of a layer reads of a block, and the tier that had it."""

    layer: int
    head: int
    document: int
    block: int
    tier: str


class StepReads(NamedTuple):
    """What a row of a step reads: units of one layer, or of all memory layers, and its attention
    mass to each [units].

    units: the same object in every step, as long as a session goes on reading the same.
    """

    units: Sequence[ReadUnit]
    masses: NDArray[np.float64]


OnRead = Callable[[StepReads], None]
"""Told what a row of a step has read, where that is anything."""


@dataclass
class Lookups:
    """Lookups done, and skipped: of (token, head, layer) because the gate was below the cutoff; of
    questions, by a model that chooses once for each.
    """

    done: int = 0
    skipped: int = 0
