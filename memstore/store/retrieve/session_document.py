"""A session's own blocks: in main memory only, and dropped with the session."""

from collections.abc import Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.index import LandmarkIndex
from memstore.tiers.cascade import Cascade


class SessionDocument(Closing):
    """A session's own blocks: pinned in the host tier and searchable until closed. A context
    manager.

    document: the negative number to lease and search them by.
    """

    def __init__(self, number: int, tiers: Cascade, index: LandmarkIndex) -> None:
        """Use Retrieval.session_document."""
        self.document = number
        self._tiers, self._index = tiers, index
        # layer -> units of each block, oldest first
        self._units: dict[int, list[list[BlockKey]]] = {}
        self._ends: dict[int, int] = {}

    def add(self, layer: int, k: Tensor, v: Tensor, landmarks: Tensor | None = None) -> int:
        """Add the next n blocks of a layer; return the number of the first.

        k, v: [n, Hkv, block_size, D] in the KV dtype, K rotated by the offset in the block only;
        landmarks: [n, Hkv, D]; None for blocks that are not searched. Raises BudgetExceeded, with
        nothing added.
        """
        n, heads = k.shape[:2]
        first = self._ends.get(layer, 0)
        units = self._tiers.host.pin(self.document, layer, first, k, v)
        if landmarks is not None:
            self._index.add(self.document, layer, first, landmarks)
        self._units.setdefault(layer, []).extend(
            units[at : at + heads] for at in range(0, n * heads, heads)
        )
        self._ends[layer] = first + n
        return first

    def blocks(self, layer: int) -> tuple[int, int]:
        """The blocks [first, end) of a layer."""
        end = self._ends.get(layer, 0)
        return end - len(self._units.get(layer, [])), end

    def trim(self, first_block: int, layers: Sequence[int] | None = None) -> None:
        """Drop blocks before first_block, in these layers or in all."""
        for layer in list(self._units) if layers is None else layers:
            held = self._units.get(layer, [])
            gone = max(0, min(first_block - self.blocks(layer)[0], len(held)))
            if gone:
                self._tiers.drop([unit for units in held[:gone] for unit in units])
                self._units[layer] = held[gone:]
                self._index.trim(self.document, first_block, layer)

    def close(self) -> None:
        """Drop all blocks; idempotent."""
        units, self._units, self._ends = self._units, {}, {}
        self._tiers.drop([unit for blocks in units.values() for block in blocks for unit in block])
        self._index.remove(self.document)
