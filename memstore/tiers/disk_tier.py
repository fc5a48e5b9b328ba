"""The lowest tier: records in the database, read a batch at a time into the slots of the tier
above, from their places in the file (memstore.disk.read.placed_read). What has none there, being
small or not committed yet, is copied from the mapped file.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.lmdb.database import Transaction
from memstore.disk.read.batch import Batch, Slots, Wanted
from memstore.disk.read.placed_read import PlacedReader
from memstore.disk.tables.catalog import Catalog
from memstore.errors import MissingBlock
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Held
from memstore.tiers.stats import TierCounter


class DiskTier:
    """Blocks as records of a database: the truth that the tiers above cache."""

    def __init__(self, catalog: Catalog) -> None:
        """Of the memory that `catalog` has open."""
        self.database = catalog.database
        self.geometry = catalog.signature.geometry
        self.stats = TierCounter()
        self._catalog = catalog
        self._placed = PlacedReader(self.database.path, catalog.blocks)
        # of the latest call; nearly always those of the next
        self._slots: tuple[Tensor, Slots] | None = None

    @property
    def counters(self) -> dict[str, TierCounter]:
        """Its counts, under its name."""
        return {"disk": self.stats}

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from, in one read transaction, in the order of the records' keys."""
        if not units:
            return [], []
        started = time.perf_counter()
        latest = self._slots  # of whichever thread: looked at once
        if latest is None or latest[0] is not slab:
            latest = self._slots = slab, Slots(raw_view(slab))
        batch = Batch(units, latest[1], slots, self._catalog.blocks)
        with self.database.read() as txn:
            wanted = batch.by_record(
                {document: self._catalog.write_of(txn, document) for document in {*batch.documents}}
            )
            left = self._placed.read(txn, batch, wanted)
            if left:
                for record, view in zip(left, self._views(txn, left)):
                    batch.fill(record, view)
        size, seconds = batch.bytes_of(range(len(units))), time.perf_counter() - started
        self.stats.count(hits=len(units), bytes=size, seconds=seconds)
        return batch.lengths, ["disk"] * len(units)

    def _views(self, txn: Transaction, wanted: Sequence[Wanted]) -> list[memoryview]:
        """Records as they lie in the mapped file. Raises CorruptBlock."""
        keys = [record[0] for record in wanted]
        views = txn.views("blocks", keys)
        if len(views) < len(keys):
            lost = (record[1] for record in wanted if txn.view("blocks", record[0]) is None)
            key = next(lost, wanted[0][1])  # damaged keys may hide from one search alone
            raise MissingBlock(f"{key}: no such record in {self.database.path}; run verify")
        return views

    def close(self) -> None:
        """Nothing ends: it has no threads."""
