"""The lowest tier: records of the database, read in batches from their positions in the file
(memstore.disk.reading) into slots of the tier above.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.reading import Batch, PlacedReader
from memstore.disk.tables.catalog import Catalog
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Held
from memstore.tiers.stats import TierCounter


class DiskTier:
    """Blocks as records of a database, which the tiers above cache."""

    def __init__(self, catalog: Catalog) -> None:
        """catalog: of an open memory."""
        self.database = catalog.database
        self.counters = {"disk": TierCounter()}
        self._catalog = catalog
        self._placed = PlacedReader(self.database.path, catalog.blocks)

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from, in one read transaction, in the order of the records' keys."""
        if not units:
            return [], []
        started = time.perf_counter()
        batch = Batch(units, raw_view(slab), slots, self._catalog.blocks)
        with self.database.read() as txn:
            writes = {number: self._catalog.write_of(txn, number) for number in batch.documents}
            self._placed.read(txn, batch, batch.by_record(writes))
        size, seconds = batch.bytes_of(range(len(units))), time.perf_counter() - started
        self.counters["disk"].count(hits=len(units), bytes=size, seconds=seconds)
        return batch.lengths, ["disk"] * len(units)

    def close(self) -> None:
        """End its threads."""
        self._placed.close()
