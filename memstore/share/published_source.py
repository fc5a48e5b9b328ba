"""Records of a publication for the host tier: from the local cache, the cache that readers share,
or the object store, in that order, many at a time. A record is used only once it was checked.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter

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
    MemoryNotFound,
    MissingBlock,
    StoreUnavailable,
)
from memstore.share.background_writes import BackgroundWrites
from memstore.share.calls import Failure
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import Extent
from memstore.share.passage_numbers import PassageNumbers
from memstore.share.piece_reader import RecordPlace
from memstore.share.pieces import most_record_bytes, piece_of, row_of
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
        self.remote, self.shared = database.remote, shared
        self.caches: dict[str, LocalCache | Valkey] = {
            **({} if local is None else {"local": local}),
            **({} if shared is None else {"valkey": shared}),
        }
        self.counters: Mapping[str, TierCounter] = {
            **{name: cache.counter for name, cache in self.caches.items()},
            "remote": self.remote.counter,
        }
        self._most = most_record_bytes(catalog.blocks.form.raw_record_bytes)
        self._writes = BackgroundWrites()
        self._slots: tuple[Tensor, Slots] | None = None  # of the latest call

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable (which names the unavailable units).
        """
        if not units:
            return [], []
        until = self.remote.until()
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
                rest = self._from_cache(name, batch, rest, until, tiers)
        if rest:
            self._from_store(batch, rest, until, used, tiers)
        return batch.lengths, tiers

    # Caches

    def _from_cache(
        self, name: str, batch: Batch, wanted: Sequence[Wanted], until: float, tiers: list[str]
    ) -> list[Wanted]:
        """Fill the records that a cache has; return the others, in order."""
        began, cache = time.perf_counter(), self.caches[name]
        found: list[Found] = []
        missing: list[Wanted] = []
        unread: list[Wanted] = []  # the failure is counted
        try:
            values = cache.get_many(self._names(wanted), self._most, until)
        except Failure:
            return list(wanted)
        for record, value in zip(wanted, values):
            if value is None:
                missing.append(record)
            elif isinstance(value, Failure):
                unread.append(record)
            else:
                found.append((record, memoryview(value)))
        good, bad = _fill(batch, found)
        for record, failure in bad:
            cache.counter.failed(failure.reason)
            self._writes.add(partial(cache.drop, *self._names([record])), 0)
            unread.append(record)
        self._count(name, batch, good, missing, tiers, time.perf_counter() - began)
        if name == "valkey":
            self._keep(good, self.caches.keys() - {"valkey"})
        return sorted(missing + unread, key=itemgetter(0))

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
        if not found or not caches:
            return
        whole = [(record, bytes(data)) for record, data in found if self._is_whole(record, data)]
        self._writes.add(lambda: self._put(whole, caches), sum(len(data) for _, data in whole))

    def _is_whole(self, record: Wanted, data: memoryview) -> bool:
        """Are all heads of a record right? Those that were wanted were checked."""
        _, key, write, places = record
        table = self._catalog.blocks
        if len(places) == table.geometry.num_kv_heads:
            return True
        try:
            table.check(data, key, write)
        except CorruptBlock:
            return False
        return True

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
        names = self._names([record for record, _ in records])
        named = [(name, data) for name, (_, data) in zip(names, records)]
        for cache in caches:
            with suppress(Failure):  # the cache counts it
                self.caches[cache].put(named)

    # Object store

    def _from_store(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        until: float,
        used: Version | None,
        tiers: list[str],
    ) -> None:
        """Fill all of these from the object store, by where the newest manifest has them.

        used: the version of the catalog that they were looked up in; None on the second try, after
        a newer manifest was read. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable.
        """
        began = time.perf_counter()
        failed: list[tuple[Wanted, Failure]] = []
        there: list[tuple[Wanted, Extent]] = []
        places = [self._place(key) for _, key, _, _ in wanted]
        for record, extent in zip(wanted, self._database.pieces.find(places, until)):
            if extent is None:
                raise self._missing(record[1])
            if isinstance(extent, Failure):
                failed.append((record, extent))
            elif extent.length > self._most:
                what = f"{record[1]} should be {extent.length:,} bytes, of {self._most:,} at most"
                failed.append((record, Failure("damaged", what)))
            else:
                there.append((record, extent))

        def check(number: int, data: memoryview) -> None:
            _, key, write, _ = there[number][0]
            try:
                self._catalog.blocks.check(data, key, write)
            except CorruptBlock as error:
                raise Failure("damaged", str(error)) from error

        found: list[Found] = []
        answers = self.remote.read([extent for _, extent in there], check, until)
        for (record, _), answer in zip(there, answers):
            if isinstance(answer, Failure):
                failed.append((record, answer))
            else:
                found.append((record, answer))
        good, bad = _fill(batch, found)
        failed += bad
        self._count("remote", batch, good, [], tiers, time.perf_counter() - began)
        self._keep(good, self.caches)
        if not failed:
            return
        # It may have been sent again, and pruning may have removed its segment.
        changed = any(failure.reason in ("missing", "damaged") for _, failure in failed)
        if changed and used is not None and self._look_again(used):
            self._from_store(batch, [record for record, _ in failed], until, None, tiers)
            return
        raise self._error(batch, failed)

    def _place(self, key: RecordKey) -> RecordPlace:
        """Where a record of a document, or of a passage, is. Raises DocumentNotFound,
        MissingBlock.
        """
        document, block = key.document, key.block
        if self._passages.has(document):
            _, document, block = self._passages.passage(document)
        entry = self._database.state.entries.get(document)
        if entry is None:
            raise DocumentNotFound(
                f"document {document} is not in {self.remote.objects.url}: it was unpublished"
            )
        piece = piece_of(entry.pieces, block)
        if piece is None:
            raise self._missing(key)
        return RecordPlace(entry.row, piece, key.layer, row_of(piece, block))

    def _missing(self, key: RecordKey) -> MissingBlock:
        return MissingBlock(f"{key}: no such record in {self.remote.objects.url}; run verify")

    def _error(self, batch: Batch, failed: Sequence[tuple[Wanted, Failure]]) -> Exception:
        (_, key, _, _), failure = failed[0]
        if all(found.reason == "damaged" for _, found in failed):
            url = self.remote.objects.url
            what = str(failure).removeprefix(f"{url}: ").partition(";")[0]
            return CorruptBlock(f"{url}: {what}; publish the document again with --check")
        units = [batch.units[at] for record, _ in failed for at in record[3]]
        worst = next(f for _, f in failed if f.reason != "damaged")
        return BlocksUnavailable(
            f"{len(units)} blocks of {self.remote.objects.url} could not be read, {key} among "
            f"them ({worst.reason}: {worst}); what is cached still answers",
            units,
        )

    def _look_again(self, used: Version) -> bool:
        """Read the newest manifest; is it another one than was used? Another thread may have read
        it in between.
        """
        with suppress(StoreUnavailable, MemoryNotFound, CorruptMemory):
            self._database.look_again()
        return self._database.version != used

    def settle(self) -> None:
        """Wait until the caches hold what was read."""
        self._writes.settle()

    def close(self) -> None:
        """End its threads, once what was read is written to the caches; idempotent."""
        self._writes.close()
        if self.shared is not None:
            self.shared.close()
        self.remote.close()


def _fill(batch: Batch, found: Sequence[Found]) -> tuple[list[Found], list[tuple[Wanted, Failure]]]:
    """Check records and copy their wanted heads into the slots; return the right and the wrong."""
    good: list[Found] = []
    bad: list[tuple[Wanted, Failure]] = []
    for record, data in found:
        try:
            batch.fill(record, data)
            good.append((record, data))
        except CorruptBlock as error:
            bad.append((record, Failure("damaged", str(error))))
    return good, bad
