"""What can be read of a document while it is written: staged chunks are pinned in the tiers, and
their landmarks are in the index.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun
from memstore.disk.format.signature import Geometry
from memstore.errors import BudgetExceeded
from memstore.store.retrieve.retrieval import Retrieval
from memstore.store.write.chunk import Chunk
from memstore.store.write.commits import RecentLandmarks
from memstore.tiers.raw_bits import from_raw, torch_dtype


class Readable:
    """The blocks and landmarks of one document that were staged or committed by its writer."""

    def __init__(
        self, retrieval: Retrieval, document: Document, memory_layers: set[int], geometry: Geometry
    ) -> None:
        self._tiers, self._index = retrieval.tiers, retrieval.index
        self._document, self._geometry = document.id, geometry
        self._memory_layers = memory_layers
        self._pinned: list[BlockKey] = []  # committed, but still among the latest blocks

    def show(self, chunk: Chunk, make_room: Sequence[Callable[[], None]]) -> None:
        """Make a staged chunk's blocks readable and its landmarks searchable; make_room: called one
        after the other while the budget has no room. Raises BudgetExceeded.
        """
        for make in make_room:
            try:
                chunk.units = self._pin(chunk)
                break
            except BudgetExceeded:
                make()
        else:
            chunk.units = self._pin(chunk)
        for layer, run in sorted(chunk.runs.items()):
            if isinstance(run, KeyRun) and layer in self._memory_layers:
                keys = from_raw(run.keys, self._geometry.dtype)
                self._index.add(self._document, layer, chunk.first_block, keys)

    def landmarks(self, layer: int, blocks: range, recent: RecentLandmarks) -> Tensor:
        """Landmark keys [n, Hkv, D] of the latest blocks; recent: of layers without memory, which
        are in no index.
        """
        if layer not in self._memory_layers:
            return from_raw(recent.keys(layer, blocks), self._geometry.dtype)
        keys = self._index.keys(layer, [(self._document, blocks.start, blocks.stop)])
        return keys.transpose(0, 1).to(torch_dtype(self._geometry.dtype))

    def committed(self, chunks: Sequence[Chunk], latest: int) -> None:
        """Committed units need no pin, but the blocks from `latest` on are about to be read and
        stay until newer ones are committed.
        """
        units = self._pinned + [unit for chunk in chunks for unit in chunk.units]
        self._pinned = [unit for unit in units if unit.block >= latest]
        # an ingest reads its latest blocks only: the others make room
        self._tiers.drop([unit for unit in units if unit.block < latest])

    def close(self) -> None:
        """Pin nothing any longer."""
        stay = self._memory_layers
        self._tiers.host.unpin([unit for unit in self._pinned if unit.layer in stay])
        self._tiers.drop([unit for unit in self._pinned if unit.layer not in stay])

    def _pin(self, chunk: Chunk) -> list[BlockKey]:
        units: list[BlockKey] = []
        try:
            for layer, (k, v) in chunk.blocks.items():
                first = chunk.first_block
                units += self._tiers.host.pin(self._document, layer, first, k, v, chunk.lengths)
        except BudgetExceeded:
            self._tiers.drop(units)
            raise
        return units
