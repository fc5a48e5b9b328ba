"""Records of a publication for the host tier: from the local cache, the cache that readers share,
or the object store, in that order, many at a time. A record is used only once it was checked.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.record import RECORD_FORMAT
from memstore.disk.lmdb.environment import Version
from memstore.disk.read.batch import Batch, Slots, Wanted
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
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import Extent
from memstore.share.passage_numbers import PassageNumbers
from memstore.share.piece_reader import RecordPlace
from memstore.share.pieces import most_record_bytes, piece_of
from memstore.share.published_database import PublishedDatabase
from memstore.share.valkey import Valkey
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Held
from memstore.tiers.stats import TierCounter

Found = tuple[Wanted, memoryview]
"""A record of a batch, and its bytes."""


class SharedSource:
    """A LowestTier over the records of a publication. May be used by several threads."""

    def __init__(
        self,
        catalog: Catalog,
        database: PublishedDatabase,
        passages: PassageNumbers,
        local: LocalCache | None,
        shared: Valkey | None,
    ) -> None:
        """catalog: over the database. local, shared: caches above the object store."""
        self._catalog, self._database, self._passages = catalog, database, passages
        self._pieces, self._writes, self._shared = database.pieces, database.pieces.writes, shared
        self.caches: dict[str, LocalCache | Valkey] = {
            **({} if local is None else {"local": local}),
            **({} if shared is None else {"valkey": shared}),
        }
        self.counters: Mapping[str, TierCounter] = {
            **{name: cache.counter for name, cache in self.caches.items()},
            "remote": self._pieces.counter,
        }
        self._most = most_record_bytes(catalog.blocks.form.raw_record_bytes)
        self._slots: tuple[Tensor, Slots] | None = None  # of the latest call

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable (which names the unavailable units).
        """
        if not units:
            return [], []
        latest = self._slots
        if latest is None or latest[0] is not slab:
            latest = self._slots = slab, Slots(raw_view(slab))
        batch = Batch(units, latest[1], slots, self._catalog.blocks)
        used = self._database.version
        with self._catalog.database.read() as txn:
            rest = batch.by_record(
                {document: self._catalog.write_of(txn, document) for document in {*batch.documents}}
            )
        tiers = [""] * len(units)
        for name in self.caches:
            if rest:
                rest = self._from_cache(name, batch, rest, tiers)
        if rest:
            self._from_store(batch, rest, used, tiers)
        return batch.lengths, tiers

    # Caches

    def _from_cache(
        self, name: str, batch: Batch, wanted: Sequence[Wanted], tiers: list[str]
    ) -> list[Wanted]:
        """Fill the records that a cache has; return the others, in order."""
        began, cache = time.perf_counter(), self.caches[name]
        good, rest = list[Found](), list[Wanted]()
        keys = self._names(wanted)
        for record, key, value in zip(wanted, keys, cache.get_many(keys, self._most)):
            try:
                if value is None:
                    rest.append(record)
                    continue
                batch.fill(record, memoryview(value))
                good.append((record, memoryview(value)))
            except CorruptBlock:
                cache.counter.failed("damaged")
                self._writes.add(partial(cache.drop, key), 0)
                rest.append(record)
        self._count(name, batch, good, rest, tiers, time.perf_counter() - began)
        if name == "valkey":
            self._keep(good, self.caches.keys() - {"valkey"})
        return rest

    def _names(self, records: Sequence[Wanted]) -> list[str]:
        """The keys of records in every cache. A key identifies the content: the model, the write
        that made the record (of a passage the digest of its tokens), the layer and the block.
        """
        start = f"memstore:{RECORD_FORMAT}:{self._catalog.signature.digest.hex()}:"
        return [f"{start}{(write or b'').hex()}:{key[2]}:{key[1]}" for _, key, write, _ in records]

    def _count(
        self,
        name: str,
        batch: Batch,
        good: Sequence[Found],
        missing: Sequence[Wanted],
        tiers: list[str],
        seconds: float,
    ) -> None:
        hits = [place for (_, _, _, places), _ in good for place in places]
        for place in hits:
            tiers[place] = name
        self.counters[name].count(
            hits=len(hits),
            misses=sum(len(places) for _, _, _, places in missing),
            bytes=batch.bytes_of(hits),
            seconds=seconds,
        )

    def _keep(self, found: Sequence[Found], caches: Collection[str]) -> None:
        """Store records that were read in caches, in the background."""
        if found and caches:
            whole = [(record, bytes(data)) for record, data in found]
            self._writes.add(lambda: self._put(whole, caches), sum(len(data) for _, data in whole))

    def keep_computed(self, digest: Digest, codec: str, k: Tensor, v: Tensor) -> None:
        """Store a passage that a reader computed in the caches, in the background, as the record
        it would have been published in.

        k, v: [tokens, width] in the KV dtype, k without position. digest: of a codec.
        """

        def put() -> None:
            encode = self._catalog.blocks.encode_passage
            record = encode(raw_view(k), raw_view(v), digest, codec)
            self._put([((b"", RecordKey(0, 0, 0), digest, ()), record)], self.caches)

        self._writes.add(put, 2 * k.nbytes)

    def _put(self, records: Sequence[tuple[Wanted, bytes]], caches: Collection[str]) -> None:
        """Store records in caches, but for those of which a head that was not wanted is damaged."""
        named = []
        for name, (record, data) in zip(self._names([record for record, _ in records]), records):
            with suppress(CorruptBlock):
                self._catalog.blocks.check(data, record[1], record[2])
                named.append((name, data))
        for cache in caches:
            self.caches[cache].put(named)

    # Object store

    def _from_store(
        self, batch: Batch, wanted: Sequence[Wanted], used: Version | None, tiers: list[str]
    ) -> None:
        """Fill all of these from the object store, by where the newest manifest has them.

        used: the version of the catalog that they were looked up in; None on the second try, after
        a newer manifest was read. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable.
        """
        began = time.perf_counter()
        failed: list[tuple[Wanted, MemstoreError]] = []
        there: list[tuple[Wanted, Extent]] = []
        places = [self._place(key) for _, key, _, _ in wanted]
        for record, extent in zip(wanted, self._pieces.find(places)):
            if extent is None:
                raise self._missing(record[1])
            if isinstance(extent, MemstoreError):
                failed.append((record, extent))
            elif extent.length > self._most:
                what = (
                    f"{record[1]} is damaged ({extent.length:,} bytes, of {self._most:,} at most)"
                )
                failed.append((record, CorruptBlock(what)))
            else:
                there.append((record, extent))
        good: list[Found] = []
        answers = self._pieces.fetch(
            [extent for _, extent in there],
            lambda number, data: batch.fill(there[number][0], memoryview(data)),
        )
        for (record, _), answer in zip(there, answers):
            if isinstance(answer, MemstoreError):
                failed.append((record, answer))
            else:
                good.append((record, answer))
        self._count("remote", batch, good, [], tiers, time.perf_counter() - began)
        self._keep(good, self.caches)
        if not failed:
            return
        # It may have been sent again, and pruning may have removed its segment.
        changed = any(isinstance(error, CorruptMemory | ObjectNotFound) for _, error in failed)
        if changed and used is not None and self._look_again(used):
            self._from_store(batch, [record for record, _ in failed], None, tiers)
            return
        raise self._error(batch, failed)

    def _place(self, key: RecordKey) -> RecordPlace:
        """Where a record of a document, or of a passage, is. Raises DocumentNotFound,
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
            f"({str(away[0]).removeprefix(f'{url}: ')}); what is cached still answers",
            units,
        )

    def _look_again(self, used: Version) -> bool:
        """Read the newest manifest; is it another one than was used? Another thread may have read
        it in between.
        """
        with suppress(MemstoreError):
            self._database.look_again()
        return self._database.version != used

    def settle(self) -> None:
        """Wait until the caches hold what was read."""
        self._writes.settle()

    def close(self) -> None:
        """End its thread, once what was read is written to the caches; idempotent."""
        self._writes.close()
        if self._shared is not None:
            self._shared.close()
