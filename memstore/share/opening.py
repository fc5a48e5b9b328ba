"""Opening a published memory: its tables, and the tiers that its blocks are read from."""

from collections.abc import Sequence
from typing import Any

from memstore.disk.catalog import Catalog, StoredAt
from memstore.disk.passage_table import Digest, PassageCounts
from memstore.share.local_cache import LocalCache
from memstore.share.open_place import open_place
from memstore.share.options import DEADLINE, LOCAL_BUDGET, REFRESH, ShareOptions
from memstore.share.remote import Remote
from memstore.share.source import SharedSource
from memstore.share.tables import PublishedDatabase
from memstore.share.valkey import Valkey


class PublishedCatalog(Catalog):
    """The tables of a published memory; what is written into a directory is not written here."""

    source: SharedSource

    def __init__(
        self,
        database: PublishedDatabase,
        local: LocalCache | None,
        shared: Valkey | None,
        *,
        allow_partial: bool = False,
    ) -> None:
        """local, shared: caches between the host tier and the object store. Raises as
        Catalog.open.
        """
        self.allow_partial = allow_partial
        self._places = database.places
        super().__init__(database)  # type: ignore[arg-type]
        self.source = SharedSource(
            self,
            database.remote,
            database.find,
            refresh=database.refresh,
            local=local,
            shared=shared,
        )

    def counts(self) -> PassageCounts:
        """Its passages, counted in each document that has them: all are stored."""
        with self.database.read() as txn:
            rows = [row for row in self.documents(txn) if row.of_passages]
        blocks = sum(row.blocks for row in rows)
        return PassageCounts(blocks, blocks, sum(row.bytes for row in rows))

    def _passage_at(self, txn: Any, digest: Digest, document: int, block: int) -> StoredAt:
        return StoredAt(self._places.number(digest, document, block), 0, True, digest)

    def bring(self, txn: Any, documents: Sequence[int], table: str) -> None:
        """Read these documents' values of a table at the same time: they are needed next. Raises
        CorruptMemory, StoreUnavailable.
        """
        txn.bring(documents, table)

    def close(self) -> None:
        """End its threads; more than once is the same as once."""
        self.source.close()
        super().close()


def open_published(url: str, options: ShareOptions) -> PublishedCatalog:
    """The tables of the published memory at a URL. Raises InvalidInput, MemoryNotFound,
    CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable, StorageFull (the local cache).
    """
    deadline = options.get("deadline") or DEADLINE
    path, server = options.get("local_cache"), options.get("valkey")
    budget = options.get("local_budget") or LOCAL_BUDGET
    local = None if path is None else LocalCache(path, budget)
    shared = None
    if server is not None:
        shared = Valkey(server, ttl=options.get("valkey_ttl"), timeout=min(2.0, deadline / 4))
    remote = Remote(open_place(url, timeout=deadline, retries=0), deadline=deadline)
    try:
        return PublishedCatalog(
            PublishedDatabase(
                remote,
                local,
                refresh=options.get("refresh") or REFRESH,
                at_least=options.get("at_least"),
            ),
            local,
            shared,
            allow_partial=options.get("allow_partial", False),
        )
    except BaseException:
        remote.close()
        raise
