"""The tables of an open publication, and its records for the host tier, read in batches and
checked.
"""

import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import Document, WriteId
from memstore.disk.reading import Batch, Wanted
from memstore.disk.tables.block_table import RECORD_FORMAT
from memstore.disk.tables.catalog import FORMAT, Catalog, StoredAt
from memstore.disk.tables.texts import Digest, PassageCounts
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    DocumentNotFound,
    MemstoreError,
    MissingBlock,
    StoreUnavailable,
)
from memstore.share.cached_reads import Read
from memstore.share.local_cache import LocalCache
from memstore.share.open_object_store import open_object_store
from memstore.share.publication import PublishedDatabase, Snapshot
from memstore.share.publication_options import DEADLINE, LOCAL_BUDGET, REFRESH, ShareOptions
from memstore.share.ranges import Extent
from memstore.share.valkey import Valkey
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import Held

_FIRST_PASSAGE = 1 << 40  # number of the first passage, above all numbers of documents
_PASSAGES = 1 << 17  # remembered passages, the most recently used ones


class PublishedCatalog(Catalog):
    """The read-only tables of a publication; `txn` is a Snapshot."""

    source: "SharedSource"

    def __init__(self, database: PublishedDatabase) -> None:
        """Raises as Catalog.open."""
        self._published = database
        super().__init__(database)  # type: ignore[arg-type]
        self.source = SharedSource(self, database)

    @property
    def manifest(self) -> int:
        """The number of the current manifest. Raises MemoryClosed."""
        self._published.version  # noqa: B018 (looks for a newer one)
        return self._published.state.manifest.number

    def _description(self, txn: Any) -> dict[str, Any]:
        manifest, selector = txn.state.manifest, txn.state.manifest.selector
        return {
            "format": FORMAT,
            "signature": manifest.signature.to_dict(),
            "codec": manifest.codec,
            "created": manifest.created,
            "selector": None if selector is None else asdict(selector),
        }

    def documents(self, txn: Any) -> list[Document]:
        """Every published document's row, in order of id."""
        return [entry.row for _, entry in sorted(txn.state.published.items())]

    def row(self, txn: Any, document: int) -> Document | None:
        """A document's row by id, or None; also of a recently unpublished document."""
        entry = txn.state.entry(document)
        return None if entry is None else entry.row

    def write_of(self, txn: Any, number: int) -> WriteId:
        """As Catalog.write_of. Raises DocumentNotFound."""
        if number >= _FIRST_PASSAGE:
            return self.source.passage(number)[0]
        return self.document(txn, number).write

    def counts(self) -> PassageCounts:
        """Counts of the passages of all documents; a shared passage counts in each."""
        entries = [e for e in self._published.state.published.values() if e.row.of_passages]
        stored = sum(entry.records for entry in entries)
        blocks, size = sum(e.row.blocks for e in entries), sum(e.row.bytes for e in entries)
        return PassageCounts(blocks, stored, size)

    def _passage_at(self, txn: Snapshot, digest: Digest, document: int, block: int) -> StoredAt:  # type: ignore[override]
        """Without a published record, "stored" if a cache may have one that a reader computed."""
        number = self.source.number(digest, document, block)
        contents = txn.contents(document)
        published = contents is not None and contents.record(block, 0) is not None
        stored = published or bool(self._published.reads.caches)
        return StoredAt(number, 0, stored, digest)

    def share(self, digest: Digest, codec: str, k: Tensor, v: Tensor) -> None:
        """Store a computed passage in the caches, as the record that would have been published.

        k, v: [tokens, width] in the KV dtype, k without position. digest: for this codec.
        """
        if caches := self._published.reads.caches:
            record = self.blocks.encode_passage(raw_view(k), raw_view(v), digest, codec)
            for cache in caches.values():
                cache.put([(self.source.name(RecordKey(0, 0, 0), digest), record)])

    def bring(self, txn: Any, documents: Sequence[int], table: str) -> None:
        """Prefetch these documents' values of a table, concurrently. Raises CorruptMemory,
        StoreUnavailable.
        """
        txn.bring(documents, table)


def open_published(url: str, options: ShareOptions) -> PublishedCatalog:
    """The tables of the publication at a URL. Raises InvalidInput, MemoryNotFound,
    CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable.
    """
    deadline = options.get("deadline") or DEADLINE
    path, server = options.get("local_cache"), options.get("valkey")
    budget = options.get("local_budget") or LOCAL_BUDGET
    local = None if path is None else LocalCache(path, budget)
    shared = None if server is None else Valkey(server, timeout=min(1.0, deadline / 10))
    objects, refresh = open_object_store(url, timeout=deadline), options.get("refresh") or REFRESH
    return PublishedCatalog(PublishedDatabase(objects, local, shared, refresh=refresh))


class SharedSource:
    """A LowestTier over the records of a publication. Equal passages have one number, valid in this
    process. Safe for several threads.
    """

    def __init__(self, catalog: Catalog, database: PublishedDatabase) -> None:
        """catalog: the catalog over `database`."""
        self._catalog, self._database = catalog, database
        self._reads, self.counters = database.reads, database.reads.counters
        raw = catalog.blocks.raw_record_bytes
        self._most = raw + raw // 16 + 1024  # zstd adds little to incompressible bytes
        self._lock = threading.Lock()
        self._numbers: dict[Digest, int] = {}
        self._known: dict[int, tuple[Digest, int, int]] = {}  # the most recently used last
        self._next = _FIRST_PASSAGE

    # Passages

    def number(self, digest: Digest, document: int, block: int) -> int:
        """The number of a passage, which is in this block of a document."""
        with self._lock:
            number = self._numbers.get(digest)
            if number is None:
                number = self._numbers[digest] = self._next
                self._next += 1
            self._known.pop(number, None)
            self._known[number] = digest, document, block
            if len(self._known) > _PASSAGES:
                gone, _, _ = self._known.pop(next(iter(self._known)))
                del self._numbers[gone]
            return number

    def passage(self, number: int) -> tuple[Digest, int, int]:
        """The digest of a passage, and the document and block that last named it. Raises
        DocumentNotFound for a number that was dropped.
        """
        known = self._known.get(number)
        if known is None:
            raise DocumentNotFound(f"passage {number} is no longer known; ask again")
        return known

    # Records

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[Held]
    ) -> tuple[list[int], list[str]]:
        """As LowestTier.read_from. Raises CorruptBlock, MissingBlock, DocumentNotFound,
        BlocksUnavailable (which names the unavailable units).
        """
        if not units:
            return [], []
        batch = Batch(units, raw_view(slab), slots, self._catalog.blocks)
        with self._catalog.database.read() as txn:
            writes = {number: self._catalog.write_of(txn, number) for number in batch.documents}
            wanted = batch.by_record(writes)
        found, seconds = self._reads.read(
            [self.name(key, write) for _, key, write, _ in wanted],
            self._most,
            lambda number, data: batch.fill(wanted[number], data),
            lambda left: self._locate([wanted[number][1] for number in left]),
        )
        tiers = self._count(batch, wanted, found, seconds)
        failed = [
            (record, error)
            for record, error in zip(wanted, found)
            if isinstance(error, MemstoreError)
        ]
        if failed:
            raise self._error(batch, failed)
        return batch.lengths, tiers

    def name(self, key: RecordKey, write: bytes) -> str:
        """The key of a record in all caches, which identifies its content: model, write id (or the
        digest of a passage), layer and block.
        """
        model = self._catalog.signature.digest.hex()
        return f"memstore:{RECORD_FORMAT}:{model}:{write.hex()}:{key.layer}:{key.block}"

    def _locate(self, keys: Sequence[RecordKey]) -> list[Extent | MemstoreError]:
        """The places of records in the object store. Raises DocumentNotFound, MissingBlock."""
        state, url = self._database.state, self._database.path
        at = [
            key[:2] if key.document < _FIRST_PASSAGE else self.passage(key.document)[1:]
            for key in keys
        ]
        entries = {document: state.entry(document) for document, _ in at}
        there = {document: entry for document, entry in entries.items() if entry is not None}
        if gone := entries.keys() - there.keys():
            raise DocumentNotFound(f"document {min(gone)} is not in {url}: it was unpublished")
        try:
            contents = dict(zip(there, self._reads.contents([*there.values()])))
        except (StoreUnavailable, CorruptMemory) as error:
            return [error] * len(keys)
        places: list[Extent | MemstoreError] = []
        for key, (document, block) in zip(keys, at):
            extent = contents[document].record(block, key.layer)
            if extent is None:
                raise MissingBlock(f"{key}: no such record in {url}; run verify")
            large = extent.length > self._most
            places.append(CorruptBlock(f"{key} has {extent.length:,} bytes") if large else extent)
        return places

    def _count(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        found: Sequence[Read | MemstoreError],
        seconds: dict[str, float],
    ) -> list[str]:
        """Count hits and misses of each tier, in units; return the tier of each unit."""
        tiers = [""] * len(batch.units)
        for (*_, places), read in zip(wanted, found):
            for place in places:
                tiers[place] = read.tier if isinstance(read, Read) else ""
        left = len(tiers)
        for tier, counter in self.counters.items():
            hits = [place for place, name in enumerate(tiers) if name == tier]
            left -= len(hits)
            misses = 0 if tier == "remote" else left
            size = batch.bytes_of(hits)
            counter.count(hits=len(hits), misses=misses, bytes=size, seconds=seconds[tier])
        return tiers

    def _error(self, batch: Batch, failed: Sequence[tuple[Wanted, MemstoreError]]) -> MemstoreError:
        (_, key, _, _), error = failed[0]
        url = self._database.path
        away = [other for _, other in failed if not isinstance(other, CorruptMemory)]
        if not away:
            what = error.reason.removeprefix(f"{url}: ")
            return CorruptBlock(f"{url}: {what}; publish the document again with --check")
        units = [batch.units[at] for record, _ in failed for at in record[3]]
        return BlocksUnavailable(
            f"{len(units)} blocks of {url} could not be read, {key} among them "
            f"({str(away[0]).removeprefix(f'{url}: ')}); cached blocks can still be read",
            units,
        )

    def close(self) -> None:
        """Close the connections to caches; idempotent."""
        self._reads.close()
