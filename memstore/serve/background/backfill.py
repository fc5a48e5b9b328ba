"""Files of documents that came to the memory otherwise than by an upload, so that all of them can
be listed, put into vector stores and deleted.
"""

import secrets
from typing import TYPE_CHECKING

from memstore.disk.document import Document
from memstore.errors import CorruptMemory, DocumentNotFound, StoreUnavailable
from memstore.serve.state.uploads import Uploads, text_of_document

if TYPE_CHECKING:
    from memstore.serve.service import Service


class Adopting:
    """Keeps the files of a server in step with a memory that others change too."""

    def __init__(self, service: "Service", uploads: Uploads) -> None:
        self._service, self._uploads = service, uploads
        self._seen: set[tuple[int, str]] | None = None  # documents, when it last looked

    def look_anew(self) -> None:
        """Have the next look take place even where the same documents are there."""
        self._seen = None

    def look(self) -> None:
        """Make a file for every finished document that has none, or of which it is no longer what
        was read. Where a document was forgotten, its file is removed, or an uploaded one has
        failed.
        """
        documents = {document.name: document for document in self._service.store.ready()}
        seen = {(document.id, document.source_hash) for document in documents.values()}
        if seen == self._seen:
            return
        database, kept = self._service.database, set()
        for row in database.rows("SELECT * FROM files WHERE state = 'ready'"):
            found = documents.get(row["document"])
            if found is not None:
                if found.source_hash == row["digest"]:
                    kept.add(found.name)
            elif row["adopted"]:
                self._uploads.remove(row)
            else:
                said = "its document was forgotten"
                self._uploads.move(
                    row, "failed", error_code="invalid_file", error=said,
                    digest="", tokens=0, stored_bytes=0,
                )  # fmt: skip
        whole = True
        for name in sorted(documents.keys() - kept):
            try:
                self._adopt(documents[name])
            except (DocumentNotFound, CorruptMemory):
                pass  # it has no text that a file could have
            except StoreUnavailable:
                whole = False  # it is tried again
        self._seen = seen if whole else None

    def _adopt(self, document: Document) -> None:
        """Make a file of a document, unless it has one that is being read, or is deleted: one that
        failed, or was of other text, is of this document from now on.
        """
        values = (
            f"file-{secrets.token_hex(12)}",
            document.name,
            document.name,
            len(text_of_document(self._service, document.name)),
            int(document.created),
            document.source_hash,
            document.tokens,
            document.bytes,
        )
        with self._service.database.transaction() as database:
            database.execute(
                "INSERT INTO files (id, filename, document, purpose, bytes, created_at, state,"
                " digest, tokens, stored_bytes, adopted)"
                " VALUES (?, ?, ?, 'user_data', ?, ?, 'ready', ?, ?, ?, 1)"
                " ON CONFLICT (document) DO UPDATE SET bytes = excluded.bytes, state = 'ready',"
                " digest = excluded.digest, tokens = excluded.tokens, error_code = NULL,"
                " error = NULL, stored_bytes = excluded.stored_bytes, adopted = 1,"
                " expires_at = NULL, owner = ''"
                " WHERE state IN ('ready', 'failed')",
                values,
            )
            database.execute(
                "DELETE FROM file_parts WHERE file IN"
                " (SELECT number FROM files WHERE document = ? AND adopted)",
                (document.name,),
            )
