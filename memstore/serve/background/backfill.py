"""Backfill: rows of files for documents that came to the memory otherwise than by an upload, so
that all of them can be listed, put into vector stores and deleted.
"""

import secrets

from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, DocumentNotFound, StoreUnavailable
from memstore.serve.state.database import Database
from memstore.serve.state.uploads import Uploads
from memstore.store.memory_store import MemoryStore


class Backfill:
    """Keeps the files of a server in step with a memory that others change too."""

    def __init__(self, database: Database, store: MemoryStore, uploads: Uploads) -> None:
        self._database, self._store, self._uploads = database, store, uploads
        self._seen: set[tuple[int, str]] | None = None  # documents, at the last run

    def invalidate(self) -> None:
        """Have the next run take place even where the same documents are there."""
        self._seen = None

    def run(self) -> None:
        """Make a file for every finished document that has none, or of which it is no longer what
        was read. Where a document was forgotten, its file is removed, or an uploaded one has
        failed.
        """
        documents = {document.name: document for document in self._store.ready()}
        seen = {(document.id, document.source_hash) for document in documents.values()}
        if seen == self._seen:
            return
        kept = set()
        for row in self._database.rows("SELECT * FROM files WHERE state = 'ready'"):
            document = documents.get(row["document"])
            if document is not None:
                if document.source_hash == row["digest"]:
                    kept.add(document.name)
            elif row["backfilled"]:
                self._uploads.remove(row)
            else:
                self._uploads.move(
                    row,
                    "failed",
                    error_code="invalid_file",
                    error="its document was forgotten",
                    digest="",
                    tokens=0,
                    stored_bytes=0,
                )
        others = "SELECT document FROM files WHERE state NOT IN ('ready', 'failed')"
        kept.update(row["document"] for row in self._database.rows(others))  # which _add leaves
        whole = True
        for name in sorted(documents.keys() - kept):
            try:
                self._add(documents[name])
            except (DocumentNotFound, CorruptMemory):
                pass  # it has no text that a file could have
            except StoreUnavailable:
                whole = False  # it is tried again
        self._seen = seen if whole else None

    def _add(self, document: Document) -> None:
        """Make a file of a document, unless it has one that is being read, or is deleted: one that
        failed, or was of other text, is of this document from now on.
        """
        values = (
            f"file-{secrets.token_hex(12)}",
            document.name,
            document.name,
            len(self._uploads.text_of_document(document.name)),
            int(document.created),
            document.source_hash,
            document.tokens,
            document.bytes,
        )
        with self._database.transaction() as database:
            database.execute(
                "INSERT INTO files (id, filename, document, purpose, bytes, created_at, state,"
                " digest, tokens, stored_bytes, backfilled)"
                " VALUES (?, ?, ?, 'user_data', ?, ?, 'ready', ?, ?, ?, 1)"
                " ON CONFLICT (document) DO UPDATE SET bytes = excluded.bytes, state = 'ready',"
                " digest = excluded.digest, tokens = excluded.tokens, error_code = NULL,"
                " error = NULL, stored_bytes = excluded.stored_bytes, backfilled = 1,"
                " expires_at = NULL, owner = ''"
                " WHERE state IN ('ready', 'failed')",
                values,
            )
            database.execute(
                "DELETE FROM file_parts WHERE file IN"
                " (SELECT number FROM files WHERE document = ? AND backfilled)",
                (document.name,),
            )
