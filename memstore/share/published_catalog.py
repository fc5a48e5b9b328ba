"""Opening a publication: its tables, and the tiers that its records are read from."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.format.record import WriteId
from memstore.disk.tables.catalog import Catalog, Changes, StoredAt
from memstore.disk.tables.passage_table import Digest, PassageCounts
from memstore.share.local_cache import LocalCache
from memstore.share.open_object_store import open_object_store
from memstore.share.passage_numbers import PassageNumbers
from memstore.share.pieces import piece_of
from memstore.share.publication_options import DEADLINE, LOCAL_BUDGET, REFRESH, ShareOptions
from memstore.share.published_database import PublishedDatabase
from memstore.share.published_source import SharedSource
from memstore.share.published_tables import Snapshot
from memstore.share.valkey import Valkey


class PublishedCatalog(Catalog):
    """The read-only tables of a publication; `txn` is a Snapshot."""

    source: SharedSource

    def __init__(self, database: PublishedDatabase) -> None:
        """Raises as Catalog.open."""
        self._published, self._numbers = database, PassageNumbers()
        super().__init__(database)  # type: ignore[arg-type]
        self.source = SharedSource(self, database, self._numbers)

    @property
    def manifest(self) -> int:
        """The number of the manifest that is read now. Raises MemoryClosed."""
        self._published.version  # noqa: B018 (looks for a newer one)
        return self._published.state.manifest.number

    def documents(self, txn: Any) -> list[Document]:
        """Every published document's row, in order of id."""
        return [entry.row for _, entry in sorted(txn.state.published.items())]

    def row(self, txn: Any, document: int) -> Document | None:
        """A document's row by id, also of an unpublished document that stays a while, or None."""
        entry = txn.state.entry(document)
        return None if entry is None else entry.row

    def write_of(self, txn: Any, number: int) -> WriteId:
        """As Catalog.write_of. Raises DocumentNotFound."""
        if self._numbers.has(number):
            return self._numbers.passage(number).digest
        return self.document(txn, number).write

    def changes(self, txn: Any) -> Changes:
        """The documents whose rows changed last, in this process."""
        found: Changes = txn.state.changes
        return found

    def leaving(self, txn: Any) -> dict[int, Document]:
        """Unpublished documents that stay a while."""
        return {number: self.document(txn, number) for number in txn.state.leaving}

    def counts(self) -> PassageCounts:
        """The passages of all documents, counted in each."""
        entries = [e for e in self._published.state.published.values() if e.row.of_passages]
        stored = sum(p.take for e in entries for p in e.pieces if p.kind == "records")
        blocks, size = sum(e.row.blocks for e in entries), sum(e.row.bytes for e in entries)
        return PassageCounts(blocks, stored, size)

    def _passage_at(self, txn: Snapshot, digest: Digest, document: int, block: int) -> StoredAt:  # type: ignore[override]
        """Also stored where no record is published but a cache may have one that another reader
        computed.
        """
        number = self._numbers.number(digest, document, block)
        entry = txn.state.entry(document)
        published = entry is not None and piece_of(entry.pieces, block) is not None
        stored = published or bool(self._published.reads.caches)
        return StoredAt(number, 0, stored, digest)

    def share(self, digest: Digest, codec: str, k: Tensor, v: Tensor) -> None:
        """Store what a session computed of a passage in the caches, so that other readers find it.
        As SharedSource.keep_computed.
        """
        self.source.keep_computed(digest, codec, k, v)

    def bring(self, txn: Any, documents: Sequence[int], table: str) -> None:
        """Read the values of a table of these documents at the same time, before they are needed.
        Raises CorruptMemory, StoreUnavailable.
        """
        txn.bring(documents, table)


def open_published(url: str, options: ShareOptions) -> PublishedCatalog:
    """The tables of the publication at a URL. Raises InvalidInput, MemoryNotFound,
    CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable, StorageFull (the local cache).
    """
    deadline = options.get("deadline") or DEADLINE
    path, server = options.get("local_cache"), options.get("valkey")
    budget = options.get("local_budget") or LOCAL_BUDGET
    local = None if path is None else LocalCache(path, budget)
    shared = None if server is None else Valkey(server, timeout=min(1.0, deadline / 10))
    database = PublishedDatabase(
        open_object_store(url, timeout=deadline),
        local,
        shared,
        refresh=options.get("refresh") or REFRESH,
        at_least=options.get("at_least"),
    )
    return PublishedCatalog(database)
