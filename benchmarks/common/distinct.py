"""How many different blocks a chunk of tokens reads: the paper's figure 5."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from memstore import MemoryStore
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.session import StepReads


class Distinct:
    """Counts what it is told (an OnRead, of all rows): different blocks, by layer and head, and by
    layer.
    """

    def __init__(self) -> None:
        self._heads: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.times: Counter[tuple[int, int]] = Counter()  # a block (document, block) was read

    def __call__(self, reads: StepReads) -> None:
        for unit in reads.units:
            block = (unit.document, unit.block)
            self._heads[unit.layer, unit.head].add(block)
            self.times[block] += 1

    @property
    def by_head(self) -> dict[tuple[int, int], int]:
        """Different blocks of every layer and head that read any."""
        return {key: len(blocks) for key, blocks in sorted(self._heads.items())}

    @property
    def by_layer(self) -> dict[int, int]:
        """Different blocks of every layer, by whichever of its heads."""
        layers: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for (layer, _), blocks in self._heads.items():
            layers[layer] |= blocks
        return {layer: len(blocks) for layer, blocks in sorted(layers.items())}


def distinct_blocks(model: LandmarkAPI, text: np.ndarray, chunk: int, **lookup: Any) -> Distinct:
    """What the last `chunk` tokens of a text read of the blocks before them, in one session that
    retrieves from its own text; lookup: LookupSettings that shall differ.
    """
    counted = Distinct()
    with (
        MemoryStore.in_memory(model.signature) as store,
        model.session(store, [], read_all_rows=True, **lookup) as session,
    ):
        session.feed(text[:-chunk].tolist())
        session.end_chunk()
        session.attention.on_read = counted
        session.feed(text[-chunk:].tolist())
    return counted
