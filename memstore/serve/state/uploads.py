"""Tables of uploaded files: their bytes, their names, and how far each is ingested.

A file is one document of the memory. Its row and its bytes are written together, so that an upload
is there or not; what has still to be done with it is said by its state. A document that came to the
memory otherwise has a file too (background/backfill.py), whose content is the document's text.
"""

import secrets
import time
import unicodedata
from collections.abc import Iterator
from pathlib import PurePath
from sqlite3 import Row
from typing import Any, BinaryIO

from memstore.disk.format.document import is_of_prompt
from memstore.model.adapter import TextTokenizer
from memstore.model.texts.document_text import document_text
from memstore.serve.api_errors import ApiError, not_found
from memstore.serve.api_keys import Access
from memstore.serve.state.database import Database
from memstore.store.memory_store import MemoryStore

# state: "queued", "reading", "ready", "failed", or "leaving": deleted, and still to be forgotten
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    filename TEXT NOT NULL,
    document TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    state TEXT NOT NULL,
    digest TEXT NOT NULL DEFAULT '',
    error_code TEXT,
    error TEXT,
    tokens INTEGER NOT NULL DEFAULT 0,
    stored_bytes INTEGER NOT NULL DEFAULT 0,
    backfilled INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT ''  -- whose quota it counts for: '' = nobody's
);
CREATE INDEX IF NOT EXISTS files_by_state ON files (state);
CREATE TABLE IF NOT EXISTS file_parts (
    file INTEGER NOT NULL REFERENCES files ON DELETE CASCADE,
    part INTEGER NOT NULL,
    content BLOB NOT NULL,
    UNIQUE (file, part)
);
CREATE TABLE IF NOT EXISTS ingested (  -- documents that were read for agents
    document TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    at REAL NOT NULL
);
"""
PURPOSES = ("assistants", "user_data")
_PART = 1 << 20  # bytes
_LONGEST = 255  # bytes of a name
_BEGUN = 3600.0  # seconds in which the reading of what an agent brings has begun


class Uploads:
    """The files of a server; every method is one transaction, of any thread."""

    def __init__(
        self,
        database: Database,
        store: MemoryStore,
        tokenizer: TextTokenizer,
        *,
        most_files: int,
        most_bytes: int,
    ) -> None:
        """store: whose documents the files are; most_files, most_bytes: of each key."""
        self._database, self._store, self._tokenizer = database, store, tokenizer
        self._most_files, self._most_bytes = most_files, most_bytes
        self._database.create(SCHEMA)

    def add(
        self, access: Access, given_name: str, content: BinaryIO, purpose: str, seconds: int | None
    ) -> Row:
        """Store a file, to be read; its row. seconds: until it expires; None = never.

        Raises ApiError for a name that is none, an empty file, a full quota and a name that the
        asker may not write; StorageFull, ReadOnlyMemory.
        """
        self._store.check_writable()
        name, number = file_name(given_name), secrets.token_hex(12)
        size = content.seek(0, 2)
        if size == 0:
            raise ApiError(400, f"{name} is empty", code="invalid_value", param="file")
        now = int(time.time())
        with self._database.transaction() as database:
            self._check_quota(access.name, size)
            if not access.sees(name):
                raise _not_allowed(name)
            document = self._free_name(name, number)
            if not access.sees(document):
                raise _not_allowed(name, "; there is one already: delete it, or take another name")
            expires = None if seconds is None else now + seconds
            database.execute(
                "INSERT INTO files (id, filename, document, purpose, bytes, created_at, expires_at,"
                " owner, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued')",
                (f"file-{number}", name, document, purpose, size, now, expires, access.name),
            )
            row = self.row(f"file-{number}")
            content.seek(0)
            for part, piece in enumerate(iter(lambda: content.read(_PART), b"")):
                database.execute(
                    "INSERT INTO file_parts VALUES (?, ?, ?)", (row["number"], part, piece)
                )
        return row

    def row(self, file: str, access: Access | None = None) -> Row:
        """The row of a file that is there. access: of who asks. Raises ApiError (404)."""
        row = self._database.row("SELECT * FROM files WHERE id = ? AND state != 'leaving'", (file,))
        if row is None or (access is not None and not access.sees(row["document"])):
            raise not_found("file", file)
        return row

    def of_document(self, name: str) -> Row | None:
        """The row of the file that a document is."""
        return self._database.row(
            "SELECT * FROM files WHERE document = ? AND state != 'leaving'", (name,)
        )

    def content(self, row: Row) -> Iterator[bytes]:
        """The bytes of a file, piece by piece; fewer where it is deleted meanwhile. Of a backfilled
        one they are one piece. Raises DocumentNotFound, CorruptMemory, StoreUnavailable.
        """
        if row["backfilled"]:
            yield self.text_of_document(row["document"])
            return
        part = 0
        while True:
            piece = self._database.row(
                "SELECT content FROM file_parts WHERE file = ? AND part = ?", (row["number"], part)
            )
            if piece is None:
                return
            yield piece["content"]
            part += 1

    def text_of_document(self, name: str) -> bytes:
        """The text of a document, in UTF-8. Raises DocumentNotFound, CorruptMemory,
        StoreUnavailable.
        """
        text = document_text(self._tokenizer, self._store, self._store.document(name))
        return "".join(text).encode(errors="replace")

    # What becomes of them

    def waiting_owners(self) -> list[str]:
        """Whose files are to be read: who waits longest first."""
        rows = self._database.rows(
            "SELECT owner FROM files WHERE state = 'queued' GROUP BY owner ORDER BY MIN(number)"
        )
        return [row["owner"] for row in rows]

    def next_queued(self, owner: str) -> Row | None:
        """The file of an owner that is to be read next."""
        return self._database.row(
            "SELECT * FROM files WHERE state = 'queued' AND owner = ? ORDER BY number LIMIT 1",
            (owner,),
        )

    def requeue(self) -> None:
        """What a server that is gone was reading is to be read."""
        self._database.execute("UPDATE files SET state = 'queued' WHERE state = 'reading'")

    def move(self, row: Row, state: str, **columns: Any) -> bool:
        """Have a file go on to another state, with these columns; False for one that was
        deleted meanwhile.
        """
        changes = ", ".join(f"{name} = :{name}" for name in ("state", *columns))
        values = {"state": state, "number": row["number"], **columns}
        return bool(
            self._database.execute(
                f"UPDATE files SET {changes} WHERE number = :number AND state != 'leaving'", values
            )
        )

    def leave(self, row: Row) -> None:
        """A file is no longer there for anybody; its document is still to be forgotten."""
        self._database.execute(
            "UPDATE files SET state = 'leaving' WHERE number = ?", (row["number"],)
        )

    def leaving(self) -> list[Row]:
        """Files whose documents are to be forgotten: those that expired since are among them."""
        self._database.execute(
            "UPDATE files SET state = 'leaving' WHERE expires_at <= ?", (int(time.time()),)
        )
        return self._database.rows("SELECT * FROM files WHERE state = 'leaving'")

    def left(self, file: int) -> Row | None:
        """The row of a file that left, by its number; None once it was removed."""
        return self._database.row("SELECT * FROM files WHERE number = ?", (file,))

    def remove(self, row: Row) -> None:
        """Delete a file that left."""
        self._database.execute("DELETE FROM files WHERE number = ?", (row["number"],))
        self._database.execute("DELETE FROM ingested WHERE document = ?", (row["document"],))

    # Names and room

    def count(self, access: Access, document: str, size: int, *, more: bool) -> None:
        """Count a document that is read for an agent as its key's. more: behind what is there;
        otherwise, until it is `counted`, as what it was and shall be, whichever is more. Raises
        ApiError for a full quota.
        """
        with self._database.transaction() as database:
            known = database.row("SELECT * FROM ingested WHERE document = ?", (document,))
            before = known["bytes"] if known is not None else 0
            after = before + size if more else max(before, size)
            if known is None or known["owner"] != access.name:
                self._check_quota(access.name, after)
            elif after > before:
                self._check_quota(access.name, after - before, documents=0)
            database.execute(
                "INSERT OR REPLACE INTO ingested VALUES (?, ?, ?, ?)",
                (document, access.name, after, time.time()),
            )

    def counted(self, document: str, size: int) -> None:
        """A document that is read for an agent takes so much now."""
        self._database.execute("UPDATE ingested SET bytes = ? WHERE document = ?", (size, document))

    def collect_garbage(self) -> None:
        """Documents that are gone, or were never begun, count no longer."""
        before = time.time() - _BEGUN
        for row in self._database.rows("SELECT * FROM ingested WHERE at < ?", (before,)):
            if not self._store.has(row["document"]):
                self._database.execute(
                    "DELETE FROM ingested WHERE document = ? AND at = ?",
                    (row["document"], row["at"]),
                )

    def _check_quota(self, owner: str, size: int, *, documents: int = 1) -> None:
        held = self._database.row(
            "SELECT COUNT(*) AS n, TOTAL(bytes) AS bytes FROM (SELECT bytes FROM files"
            " WHERE owner = :owner UNION ALL SELECT bytes FROM ingested WHERE owner = :owner)",
            {"owner": owner},
        )
        assert held is not None
        if held["n"] + documents > self._most_files:
            raise _over_quota(f"a key may have {self._most_files:,} files")
        if held["bytes"] + size > self._most_bytes:
            raise _over_quota(f"the files of a key may take {self._most_bytes:,} bytes together")

    def _free_name(self, name: str, number: str) -> str:
        """What the file's document is called: as the file, unless that is taken."""
        if is_of_prompt(name):
            name = f"upload-{name}"
        taken = self._database.row("SELECT 1 FROM files WHERE document = ?", (name,))
        if taken is None and not self._store.has(name):
            return name
        path = PurePath(name)
        return f"{path.stem}-{number[:8]}{path.suffix}"


def file_name(given: str) -> str:
    """The name of an uploaded file, without folders. Raises ApiError for what is no name."""
    name = given.replace("\\", "/").rsplit("/", 1)[-1].strip()
    strange = [c for c in name if unicodedata.category(c) in ("Cc", "Cs", "Cn", "Zl", "Zp")]
    turned = any(unicodedata.bidirectional(c) in _TURNING for c in name)
    if not name.strip(".") or strange or turned or len(name.encode(errors="replace")) > _LONGEST:
        raise ApiError(
            400,
            f"a file needs a name of at most {_LONGEST} bytes, without control characters",
            code="invalid_value",
            param="file",
        )
    return name


_TURNING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def _not_allowed(name: str, why: str = "") -> ApiError:
    return ApiError(
        403,
        f"this key may not write a document called {name!r}{why}",
        type="permission_error",
        code="insufficient_scope",
        param="file",
    )


def _over_quota(what: str) -> ApiError:
    return ApiError(413, f"{what}; delete some", code="quota_exceeded", param="file")
