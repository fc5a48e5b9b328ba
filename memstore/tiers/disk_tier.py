"""The lowest tier: records in the database, read a batch at a time into the slots of the tier
above.

Records that the system's page cache holds are copied from the mapped file; for the others, see
memstore.disk.read.cold_read.
"""

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.lmdb.database import Transaction
from memstore.disk.read import cold_read
from memstore.disk.read.batch import Batch, Slots, Wanted
from memstore.disk.read.work_sharing import Threads
from memstore.disk.tables.catalog import Catalog
from memstore.errors import MissingBlock
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.stats import TierCounter

_WATCH = 64  # batches for which the disk is asked in advance, after one that needed it
_SLOW = 50e-6  # seconds for a record: beyond, it may have come from the disk
# records at least, or bytes, that are read before it is seen that the disk had to
_FEW, _FEW_BYTES = 8, 1 << 20
# Of a batch that threads share: bytes that one takes together, of records that are copied and of
# those that are decoded; and bytes of the records that are worth it (docs/appendix/storage.md).
_TOGETHER, _DECODED_TOGETHER = 1 << 20, 128 << 10
_SHARED = 512 << 10

# Records, and as they lie in the mapped file; and before that was looked up, what the disk had read
# and the time.
_Part = tuple[Sequence[Wanted], Sequence[memoryview], int, float]


class DiskTier:
    """Blocks as records of a database: the truth that the tiers above cache."""

    def __init__(self, catalog: Catalog, threads: int | None = None) -> None:
        """Of the memory that `catalog` has open. threads: that read one batch at most, by default
        one a core, up to four.
        """
        self.database = catalog.database
        self.geometry = catalog.signature.geometry
        self.stats = TierCounter()
        self._catalog = catalog
        self._threads = Threads(threads)
        self._cold = cold_read.ColdReader(self.database, catalog.blocks, self._threads)
        # batches to come for which the disk is asked in advance
        self._watch = _WATCH if cold_read.CAN_WATCH else 0
        # of the latest call; nearly always those of the next
        self._slots: tuple[Tensor, Slots] | None = None

    @property
    def counters(self) -> dict[str, TierCounter]:
        """Its counts, under its name."""
        return {"disk": self.stats}

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """As `read`; of each unit also the name of the tier that had it."""
        return self.read(units, slab, slots), ["disk"] * len(units)

    def nearest(self, units: Sequence[BlockKey]) -> list[str]:
        """The disk has them all."""
        return ["disk"] * len(units)

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of the slab with unit `units[i]`; return each unit's valid content
        tokens.

        slab: contiguous, on the CPU, [S, 2, block_size, head_dim] in the KV dtype, K before V. One
        read transaction, walked in key order; nothing of the file outlives it. Raises CorruptBlock,
        DocumentNotFound.
        """
        if not units:
            return []
        started = time.perf_counter()
        latest = self._slots  # of whichever thread: looked at once
        if latest is None or latest[0] is not slab:
            latest = self._slots = slab, Slots(raw_view(slab))
        batch = Batch(units, latest[1], slots, self._catalog.blocks)
        with self.database.read() as txn:
            rest: Sequence[Wanted] = batch.by_record(
                {document: self._catalog.writes(txn, document) for document in {*batch.documents}}
            )
            if not self._watch:
                rest = self._read_mapped(txn, rest, batch, watching=True)
            if rest:
                rest, needed = self._cold.read(txn, batch, rest)
                self._watch = _WATCH if needed else max(0, self._watch - 1)
                self._read_mapped(txn, rest, batch, watching=False)
        seconds = time.perf_counter() - started
        for layer in set(batch.layers):
            count = batch.layers.count(layer)
            share = seconds * count / len(units)
            self.stats.count(layer, hits=count, bytes=count * batch.unit_bytes, seconds=share)
        return batch.lengths

    def _read_mapped(
        self, txn: Transaction, wanted: Sequence[Wanted], batch: Batch, *, watching: bool
    ) -> Sequence[Wanted]:
        """Copy records from the mapped file, which is fast where the page cache has them.

        watching: as soon as some had to come from the disk, return those that are left.
        """
        each, threads = self._shares(len(wanted), alone=txn.writable)
        batch.shared = threads > 1
        taken, slow = 0, False

        def parts() -> Iterator[_Part]:
            nonlocal taken
            while taken < len(wanted) and not slow:
                few = wanted[taken : taken + each]
                taken += len(few)
                before, began = cold_read.disk_reads() if watching else 0, time.perf_counter()
                yield few, self._views(txn, few), before, began

        def fill(part: _Part) -> None:
            nonlocal slow
            few, views, before, began = part
            batch.fill_all(few, views)
            if (
                watching
                and time.perf_counter() - began > _SLOW * len(few)
                and cold_read.disk_reads() != before
            ):
                slow = True

        self._threads.share(parts(), fill, threads)
        if slow:
            self._watch = _WATCH
        return wanted[taken:]

    def _shares(self, count: int, *, alone: bool) -> tuple[int, int]:
        """How many records of a batch are read together, and by how many threads (alone: by one,
        as a transaction that writes belongs to its thread).
        """
        size = self.geometry.record_bytes
        raw = self._catalog.blocks.codec == "raw"  # imported documents may have another
        together = _TOGETHER if raw else _DECODED_TOGETHER
        each = max(1, together // size)
        threads = min(self._threads.count, -(-count // each))
        if alone or threads < 2 or size < _SHARED:
            return max(_FEW, _FEW_BYTES // size), 1
        return each, threads

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
        """End its threads; it still reads, on the caller's."""
        self._threads.close()
