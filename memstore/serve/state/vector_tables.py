"""Tables of vector stores: named sets of files, with attributes and a time at which they expire."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from sqlite3 import Row
from typing import Any, NamedTuple

from memstore.serve.api_errors import ApiError, not_found
from memstore.serve.api_keys import Access
from memstore.serve.state.database import Database

# a file's own state says how far it is: `cancelled` is what a batch adds to it (file_batches.py)
SCHEMA = """
CREATE TABLE IF NOT EXISTS vector_stores (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    description TEXT,
    metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL,
    expires_days INTEGER,
    expired INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS vector_store_files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    store INTEGER NOT NULL REFERENCES vector_stores ON DELETE CASCADE,
    file INTEGER NOT NULL REFERENCES files ON DELETE CASCADE,
    attributes TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL,  -- who put it there, for whose quota it counts
    UNIQUE (store, file)
);
CREATE INDEX IF NOT EXISTS vector_stores_of_file ON vector_store_files (file);
CREATE INDEX IF NOT EXISTS vector_store_files_owner ON vector_store_files (owner);
"""
_DAY = 86_400
# of one key's own
_STORES = 10_000
_LINKS = 100_000  # files in stores
STATUS = (
    "CASE WHEN l.cancelled THEN 'cancelled' WHEN f.state = 'ready' THEN 'completed'"
    " WHEN f.state = 'failed' THEN 'failed' ELSE 'in_progress' END"
)
# the files of a store, as they are listed; a condition on l.store follows
LINKS = (
    f"SELECT f.id, f.filename, f.document, f.stored_bytes, f.error_code, f.error, l.number,"
    f" l.attributes, l.created_at, {STATUS} AS status"
    " FROM vector_store_files l JOIN files f ON f.number = l.file"
    " WHERE f.state != 'leaving'"
)
STATUSES = ("in_progress", "completed", "failed", "cancelled")


class Entry(NamedTuple):
    """A file that shall be in a vector store, and its attributes."""

    file: str
    attributes: Mapping[str, Any]


class VectorStores:
    """The vector stores of a server; every method is one transaction, of any thread.

    A key that sees all documents sees all stores; one that sees some, those it made itself.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.create(SCHEMA)

    # Stores

    def create(
        self,
        name: str,
        description: str | None,
        metadata: Mapping[str, str],
        days: int | None,
        files: Sequence[Entry],
        access: Access,
    ) -> Row:
        """Make a store with these files; its row. days: without use, after which it expires.
        Raises ApiError (404) for an unknown file, (413) for a full quota.
        """
        now, id_ = int(time.time()), f"vs_{secrets.token_hex(12)}"
        with self.database.transaction() as database:
            self._check_quota("vector_stores", 1, _STORES, access)
            self.check_links(len(files), access)
            database.execute(
                "INSERT INTO vector_stores (id, owner, name, description, metadata, created_at,"
                " last_active_at, expires_days) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (id_, access.name, name, description, json.dumps(metadata), now, now, days),
            )
            row = self.row(id_, access)
            for file in files:
                self.add_file(row, file, access)
        return row

    def row(self, id_: str, access: Access) -> Row:
        """The row of a store, expired or not. Raises ApiError (404)."""
        self.expire()
        row = self.database.row("SELECT * FROM vector_stores WHERE id = ?", (id_,))
        if row is None or not may_see(row, access):
            raise not_found("vector store", id_)
        return row

    def used(self, id_: str, access: Access) -> Row:
        """The row of a store that is used now. Raises ApiError (404; 400 for an expired one)."""
        row = self.row(id_, access)
        if row["expired"]:
            raise ApiError(400, f"vector store {id_!r} has expired; make a new one", code="expired")
        self.database.execute(
            "UPDATE vector_stores SET last_active_at = ? WHERE number = ?",
            (int(time.time()), row["number"]),
        )
        return row

    def update(self, id_: str, changes: Mapping[str, Any], access: Access) -> Row:
        """Change columns of a store; its row."""
        with self.database.transaction():
            row = self.used(id_, access)
            for column, value in changes.items():
                self.database.execute(
                    f"UPDATE vector_stores SET {column} = ? WHERE number = ?",
                    (value, row["number"]),
                )
            return self.row(id_, access)

    def delete(self, id_: str, access: Access) -> None:
        """Delete a store; its files stay files. Raises ApiError (404)."""
        row = self.row(id_, access)
        self.database.execute("DELETE FROM vector_stores WHERE number = ?", (row["number"],))

    def expire(self) -> None:
        """Stores that were not used for so long are empty from now on."""
        with self.database.transaction() as database:
            ended = database.rows(
                "SELECT number FROM vector_stores WHERE NOT expired AND"
                f" last_active_at + expires_days * {_DAY} <= ?",
                (int(time.time()),),
            )
            for row in ended:
                number = (row["number"],)
                database.execute("UPDATE vector_stores SET expired = 1 WHERE number = ?", number)
                database.execute("DELETE FROM vector_store_files WHERE store = ?", number)

    # Files of a store

    def attach(self, id_: str, file: Entry, access: Access) -> Row:
        """Put a file into a store, or give it other attributes there; its link."""
        with self.database.transaction():
            row = self.used(id_, access)
            self.check_links(1, access)
            self.add_file(row, file, access)
            return self.link(row, file.file)

    def link(self, store: Row, file: str, access: Access | None = None) -> Row:
        """A file as it is in a store. Raises ApiError (404)."""
        row = self.database.row(f"{LINKS} AND l.store = ? AND f.id = ?", (store["number"], file))
        if row is None or (access is not None and not access.sees(row["document"])):
            raise not_found("file in this vector store", file)
        return row

    def links(self, store: Row, access: Access) -> list[Row]:
        """The files of a store that the asker may know of, oldest first."""
        rows = self.database.rows(f"{LINKS} AND l.store = ? ORDER BY l.number", (store["number"],))
        return [row for row in rows if access.sees(row["document"])]

    def set_attributes(
        self, id_: str, file: str, attributes: Mapping[str, Any], access: Access
    ) -> Row:
        """Give a file of a store other attributes; its link."""
        with self.database.transaction():
            store = self.used(id_, access)
            link = self.link(store, file, access)
            self.database.execute(
                "UPDATE vector_store_files SET attributes = ? WHERE number = ?",
                (json.dumps(attributes), link["number"]),
            )
            return self.link(store, file)

    def detach(self, id_: str, file: str, access: Access) -> None:
        """Take a file out of a store; it stays a file. Raises ApiError (404)."""
        with self.database.transaction():
            link = self.link(self.used(id_, access), file, access)
            self.database.execute(
                "DELETE FROM vector_store_files WHERE number = ?", (link["number"],)
            )

    def check_links(self, more: int, access: Access) -> None:
        """Raises ApiError (413) where a key may not put so many more files into stores."""
        self._check_quota("vector_store_files", more, _LINKS, access)

    def _check_quota(self, table: str, more: int, most: int, access: Access) -> None:
        held = self.database.row(
            f"SELECT COUNT(*) AS n FROM {table} WHERE owner = ?", (access.name,)
        )
        assert held is not None
        if held["n"] + more > most:
            what = table.replace("_", " ")
            message = f"a key may have {most:,} {what}; delete some"
            raise ApiError(413, message, code="quota_exceeded")

    def add_file(self, store: Row, file: Entry, access: Access) -> int:
        row = self.database.row(
            "SELECT number, document FROM files WHERE id = ? AND state != 'leaving'", (file.file,)
        )
        if row is None or not access.sees(row["document"]):
            raise not_found("file", file.file)
        self.database.execute(
            "INSERT INTO vector_store_files (store, file, attributes, created_at, owner)"
            " VALUES (:store, :file, :attributes, :now, :owner) ON CONFLICT (store, file)"
            " DO UPDATE SET attributes = :attributes, cancelled = 0",
            {
                "store": store["number"],
                "file": row["number"],
                "attributes": json.dumps(file.attributes),
                "now": int(time.time()),
                "owner": access.name,
            },
        )
        link = self.database.row(
            "SELECT number FROM vector_store_files WHERE store = ? AND file = ?",
            (store["number"], row["number"]),
        )
        assert link is not None
        number: int = link["number"]
        return number

    def counts(self, store: Row, access: Access) -> tuple[dict[str, int], int]:
        """How many files of a store, of which the asker may know, are in which status, and the
        bytes that they take in the memory.
        """
        return self.count(f"{LINKS} AND l.store = ?", store["number"], access)

    def count(self, select: str, number: int, access: Access) -> tuple[dict[str, int], int]:
        alike = "status, document" if access.only else "status"
        rows = self.database.rows(
            f"SELECT status, document, COUNT(*) AS n, TOTAL(stored_bytes) AS bytes FROM ({select})"
            f" GROUP BY {alike}",
            (number,),
        )
        counts, size = dict.fromkeys(STATUSES, 0), 0.0
        for row in rows:
            if access.sees(row["document"]):
                counts[row["status"]] += row["n"]
                size += row["bytes"]
        return counts | {"total": sum(counts.values())}, int(size)


def may_see(store: Row, access: Access) -> bool:
    """May an asker know of a store?"""
    return not access.only or bool(store["owner"] == access.name)


def expires_at(store: Row) -> int | None:
    """When a store expires, or did, if it is not used before."""
    days = store["expires_days"]
    return None if days is None else store["last_active_at"] + days * _DAY
