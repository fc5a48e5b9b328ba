"""Tables of file batches: files that were put into a vector store together."""

import secrets
import time
from collections.abc import Sequence
from sqlite3 import Row

from memstore.serve.api_errors import not_found
from memstore.serve.api_keys import Access
from memstore.serve.state.vector_tables import LINKS, Entry, VectorStores

SCHEMA = """
CREATE TABLE IF NOT EXISTS file_batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    store INTEGER NOT NULL REFERENCES vector_stores ON DELETE CASCADE,
    created_at INTEGER NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS file_batches_owner ON file_batches (owner);
CREATE TABLE IF NOT EXISTS file_batch_files (
    batch INTEGER NOT NULL REFERENCES file_batches ON DELETE CASCADE,
    file INTEGER NOT NULL REFERENCES vector_store_files ON DELETE CASCADE,
    PRIMARY KEY (batch, file)
);
"""
_MOST = 1_000  # of one key's own; beyond it, the oldest are forgotten
OF_BATCH = "l.number IN (SELECT file FROM file_batch_files WHERE batch = ?)"
"""Condition on LINKS."""


class FileBatches:
    """The batches of all vector stores; every method is one transaction, of any thread."""

    def __init__(self, stores: VectorStores) -> None:
        self._stores, self._database = stores, stores.database
        self._database.create(SCHEMA)

    def create(self, id_: str, files: Sequence[Entry], access: Access) -> Row:
        """Put files into a store together, all of them or none; the batch."""
        batch = f"vsfb_{secrets.token_hex(12)}"
        with self._database.transaction() as database:
            store = self._stores.used(id_, access)
            self._stores.check_links(len(files), access)
            database.execute(
                "INSERT INTO file_batches (id, store, created_at, owner) VALUES (?, ?, ?, ?)",
                (batch, store["number"], int(time.time()), access.name),
            )
            database.execute(
                "DELETE FROM file_batches WHERE number IN (SELECT number FROM file_batches"
                " WHERE owner = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
                (access.name, _MOST),
            )
            row = self.row(store, batch)
            for file in files:
                database.execute(
                    "INSERT OR IGNORE INTO file_batch_files VALUES (?, ?)",
                    (row["number"], self._stores.add_file(store, file, access)),
                )
        return row

    def row(self, store: Row, id_: str) -> Row:
        """A batch of a store. Raises ApiError (404)."""
        row = self._database.row(
            "SELECT * FROM file_batches WHERE id = ? AND store = ?", (id_, store["number"])
        )
        if row is None:
            raise not_found("file batch", id_)
        return row

    def cancel(self, store: Row, id_: str) -> Row:
        """Take back those files of a batch that are not read yet; the batch."""
        with self._database.transaction() as database:
            row = self.row(store, id_)
            database.execute(
                "UPDATE vector_store_files SET cancelled = 1 WHERE number IN ("
                "SELECT b.file FROM file_batch_files b JOIN vector_store_files l"
                " ON l.number = b.file JOIN files f ON f.number = l.file"
                " WHERE b.batch = ? AND f.state IN ('queued', 'reading'))",
                (row["number"],),
            )
            database.execute(
                "UPDATE file_batches SET cancelled = 1 WHERE number = ?", (row["number"],)
            )
            return self.row(store, id_)

    def counts(self, batch: Row, access: Access) -> dict[str, int]:
        """How many such files of a batch are in which status."""
        return self._stores.count(f"{LINKS} AND {OF_BATCH}", batch["number"], access)[0]
