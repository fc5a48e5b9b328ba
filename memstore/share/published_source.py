"""Records of a publication for the host tier, many at a time. A record is used only once it was
checked.
"""

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.record import RECORD_FORMAT
from memstore.disk.lmdb.environment import Version
from memstore.disk.reading import Batch, Wanted
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    DocumentNotFound,
    MemstoreError,
    MissingBlock,
    ObjectNotFound,
)
from memstore.share.cached_reads import Read
from memstore.share.object_store import Extent
from memstore.share.passage_numbers import PassageNumbers
from memstore.share.piece_reader import RecordPlace
from memstore.share.pieces import most_record_bytes, piece_of
from memstore.share.published_database import PublishedDatabase
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Held


class SharedSource:
    """A LowestTier over the records of a publication. May be used by several threads."""

    def __init__(
        self, catalog: Catalog, database: PublishedDatabase, passages: PassageNumbers
    ) -> None:
        """catalog: over the database."""
        self._catalog, self._database, self._passages = catalog, database, passages
        self._reads, self.counters = database.reads, database.reads.counters
        self._most = most_record_bytes(catalog.blocks.form.raw_record_bytes)

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable (which names the unavailable units).
        """
        if not units:
            return [], []
        batch = Batch(units, raw_view(slab), slots, self._catalog.blocks)
        used = self._database.version
        with self._catalog.database.read() as txn:
            writes = {number: self._catalog.write_of(txn, number) for number in batch.documents}
            wanted = batch.by_record(writes)
        tiers = [""] * len(units)
        self._fill(batch, wanted, used, tiers)
        return batch.lengths, tiers

    def _fill(
        self, batch: Batch, wanted: Sequence[Wanted], used: Version | None, tiers: list[str]
    ) -> None:
        """Fill all of these.

        used: the version of the catalog that they were looked up in; None on the second try, after
        a newer manifest was read. Raises as `read_from`.
        """

        def check_whole(number: int, data: memoryview) -> None:
            _, key, write, _ = wanted[number]
            self._catalog.blocks.check(data, key, write)  # also heads that were not wanted

        found, seconds = self._reads.read(
            [self._name(key, write) for _, key, write, _ in wanted],
            self._most,
            lambda number, data: batch.fill(wanted[number], data),
            lambda left: self._locate([wanted[number][1] for number in left]),
            check_whole,
        )
        self._count(batch, wanted, found, seconds, tiers)
        failed = [
            (record, error)
            for record, error in zip(wanted, found)
            if isinstance(error, MemstoreError)
        ]
        if not failed:
            return
        # It may have been sent again, and pruning may have removed its segment.
        changed = any(isinstance(error, CorruptMemory | ObjectNotFound) for _, error in failed)
        if changed and used is not None and self._look_again(used):
            self._fill(batch, [record for record, _ in failed], None, tiers)
            return
        raise self._error(batch, failed)

    def _name(self, key: RecordKey, write: bytes | None) -> str:
        """The name of a record in every cache. It identifies the content: the model, the write that
        made the record (of a passage the digest of its tokens), the layer and the block.
        """
        model = self._catalog.signature.digest.hex()
        return f"memstore:{RECORD_FORMAT}:{model}:{(write or b'').hex()}:{key.layer}:{key.block}"

    def _locate(self, keys: Sequence[RecordKey]) -> list[Extent | MemstoreError]:
        """Where records are in the object store. Raises DocumentNotFound, MissingBlock."""
        places: list[Extent | MemstoreError] = []
        for key, extent in zip(keys, self._database.pieces.find([*map(self._place, keys)])):
            if extent is None:
                raise self._missing(key)
            if isinstance(extent, Extent) and extent.length > self._most:
                what = f"{key} should be {extent.length:,} bytes, of {self._most:,} at most"
                extent = CorruptBlock(what)
            places.append(extent)
        return places

    def _place(self, key: RecordKey) -> RecordPlace:
        """The piece of a record of a document, or of a passage. Raises DocumentNotFound,
        MissingBlock.
        """
        document, block = key.document, key.block
        if self._passages.has(document):
            _, document, block = self._passages.passage(document)
        entry = self._database.state.entry(document)
        if entry is None:
            raise DocumentNotFound(
                f"document {document} is not in {self._database.path}: it was unpublished"
            )
        piece = piece_of(entry.pieces, block)
        if piece is None:
            raise self._missing(key)
        return RecordPlace(entry.row, piece, key.layer, block)

    def _missing(self, key: RecordKey) -> MissingBlock:
        return MissingBlock(f"{key}: no such record in {self._database.path}; run verify")

    def _count(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        found: Sequence[Read | MemstoreError],
        seconds: dict[str, float],
        tiers: list[str],
    ) -> None:
        """Count the units that each tier had, and those that it lacked."""
        left = sum(len(record[3]) for record in wanted)
        for tier, counter in self.counters.items():
            hits = [
                place
                for record, read in zip(wanted, found)
                if isinstance(read, Read) and read.tier == tier
                for place in record[3]
            ]
            for place in hits:
                tiers[place] = tier
            left -= len(hits)
            misses = 0 if tier == "remote" else left
            size = batch.bytes_of(hits)
            counter.count(hits=len(hits), misses=misses, bytes=size, seconds=seconds[tier])

    def _error(self, batch: Batch, failed: Sequence[tuple[Wanted, MemstoreError]]) -> MemstoreError:
        (_, key, _, _), error = failed[0]
        url = self._database.path
        away = [other for _, other in failed if not isinstance(other, CorruptMemory)]
        if not away:
            what = str(error).removeprefix(f"{url}: ").partition(";")[0]
            return CorruptBlock(f"{url}: {what}; publish the document again with --check")
        units = [batch.units[at] for record, _ in failed for at in record[3]]
        return BlocksUnavailable(
            f"{len(units)} blocks of {url} could not be read, {key} among them "
            f"({str(away[0]).removeprefix(f'{url}: ')}); cached blocks can still be read",
            units,
        )

    def _look_again(self, used: Version) -> bool:
        """Read the newest manifest; is it another one than was used? Another thread may have read
        it in between.
        """
        with suppress(MemstoreError):
            self._database.look_again()
        return self._database.version != used

    def keep_computed(self, digest: Digest, codec: str, k: Tensor, v: Tensor) -> None:
        """Store a passage that a reader computed in the caches, in the background, as the record
        it would have been published in.

        k, v: [tokens, width] in the KV dtype, k without position. digest: of a codec.
        """
        encode = self._catalog.blocks.encode_passage
        self._reads.store(
            lambda: (
                self._name(RecordKey(0, 0, 0), digest),
                encode(raw_view(k), raw_view(v), digest, codec),
            ),
            2 * k.nbytes,
        )

    def close(self) -> None:
        """Write to the caches what was read, and end their thread; idempotent."""
        self._reads.close()
