"""Writing documents into a memory, describing and forgetting them."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memstore.disk.files import remove_index
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.lmdb.database import Transaction
from memstore.store.refresh import Committed
from memstore.store.stored_documents import StoredDocuments
from memstore.store.write import admission
from memstore.store.write.admission import Mode
from memstore.store.write_locks import written_here

if TYPE_CHECKING:  # imported where it is used: most commands need none of it
    from memstore.store.size_estimate import SizeEstimate
    from memstore.store.write.writer import DocumentWriter


class WrittenDocuments(StoredDocuments):
    """The documents of a memory, as they are written, described and forgotten."""

    def forget(self, name: str, *, erase: bool = False) -> Document:
        """Delete a document's blocks, landmark keys and tokens; no later answer reads them. Return
        what it was.

        The file keeps its size, and bytes of the document on pages that are not used again yet,
        until `compact`. erase: rewrite the file without any byte of it, and remove the index files,
        which are built from all documents; all or nothing, and the memory is needed alone. Raises
        DocumentNotFound, ReadOnlyMemory, MemoryLocked, StorageFull (erase).
        """
        committed = self._writable()
        catalog = committed.catalog
        with written_here(committed, name, wait=self._wait_for_writer):
            document = self.document(name)
            numbers = [row.id for row in committed.rows.named(name)]  # also what is half read

            def work(txn: Transaction) -> None:
                for number in numbers:
                    catalog.delete_document(txn, number)

            if erase:
                path = catalog.database.path
                catalog.database.rewrite(work, before_switch=lambda: remove_index(path))
            else:
                catalog.database.write(work, beyond_limit=True)
        self._refresh()
        return document

    def write_document(
        self,
        name: str,
        *,
        source_hash: str,
        settings: IngestSettings,
        mode: Mode = "new",
        metadata: dict[str, Any] | None = None,
        commit_bytes: int | None = None,
    ) -> "DocumentWriter | None":
        """Begin a document, or continue one that was interrupted; None if the same content is there
        already.

        source_hash: of the content; the same name with another hash is another content. An
        interrupted ingest continues only with the same settings. mode: "new"; "append" (continue a
        ready document from its last full chunk: see DocumentWriter.base_tokens; one of passages
        from its last: see DocumentWriter.replaced_passages); "replace" (the old content answers
        until the new one is whole). metadata: what its row says of it, plain values
        (of a document that is appended to, in place of what it said, unless that is None); what is
        continued keeps its own.
        commit_bytes: of a transaction, about; default writer.COMMIT_BYTES.

        Several documents may be written at once by one process; until the last of their writers is
        closed, other processes cannot write. Raises DocumentExists, DocumentNotFound (append),
        InvalidInput, ReadOnlyMemory, MemoryLocked (also for a document that is being written),
        StorageFull.
        """
        admission.check_request(name, settings, mode)
        admission.check_metadata(metadata or {})
        admission.check_passages(settings, self.signature, self.selector)
        for row in self._named(name):
            if admission.is_there(row, source_hash, settings, mode):
                # asked before taking a lock: it also holds for a memory that is read-only or being
                # written
                return None
        if mode == "append":
            there = self.document(name).metadata
            metadata = there if metadata is None else metadata
        committed = self._writable()
        catalog = committed.catalog
        with ExitStack() as locks:
            locks.enter_context(written_here(committed, name, wait=self._wait_for_writer))
            wanted = admission.wanted(catalog, name, source_hash, settings, metadata)
            admitted = admission.admit(self._named(name), wanted, mode)
            if admitted is None:
                return None
            return self._writer(committed, admitted, locks, commit_bytes)

    def _writer(
        self,
        committed: Committed,
        admitted: admission.Admission,
        locks: ExitStack,
        commit_bytes: int | None,
    ) -> "DocumentWriter":
        """The writer of a document that may be written; it takes the locks."""
        from memstore.store.write.writer import COMMIT_BYTES, DocumentWriter, InStore

        catalog, retrieval = committed.catalog, self._retrieve()
        document = admission.begin(catalog, admitted)
        if document.state != "ready":
            with catalog.database.read() as txn:
                retrieval.load(txn, document)
        held = ExitStack()  # by the writer, once there is one
        writer = DocumentWriter(
            catalog,
            retrieval,
            document,
            replaces=admitted.replaces,
            commit_bytes=COMMIT_BYTES if commit_bytes is None else commit_bytes,
            in_store=InStore(held, self._store_staged, committed.ended),
        )
        held.callback(locks.pop_all().close)
        committed.writers[document.id] = writer
        return writer

    def describe(self, name: str, metadata: dict[str, Any]) -> Document:
        """Change what the row of a document says of it (`Document.metadata`), and return it.

        Raises DocumentNotFound, InvalidInput (no plain values), ReadOnlyMemory, MemoryLocked,
        StorageFull.
        """
        admission.check_metadata(metadata)
        committed = self._writable()
        with written_here(committed, name, wait=self._wait_for_writer):
            document = replace(self.document(name), metadata=metadata)
            catalog = committed.catalog
            catalog.database.write(lambda txn: catalog.put_document(txn, document))
        self._refresh()
        return document

    def estimate_size(
        self,
        name: str,
        tokens: int,
        *,
        source_hash: str,
        settings: IngestSettings,
        mode: Mode = "new",
        stored: int = 0,
    ) -> "SizeEstimate | None":
        """What a document of about so many tokens will be here, before it is written; None if the
        same content is there already. stored: tokens of it whose passages are stored, which cost
        nothing (`kept`). The rest as for write_document.

        Raises StorageFull if the quota or the disk have no room for it.
        """
        from memstore.store.size_estimate import estimate_size

        if self.path is None:
            self._writable()  # refuses
        for row in self._named(name):
            if admission.is_there(row, source_hash, settings, mode):
                return None
        committed = self._on_disk()
        wanted = admission.wanted(committed.catalog, name, source_hash, settings)
        return estimate_size(committed.catalog, committed.rows, wanted, tokens, stored)

    def _store_staged(self) -> None:
        for writer in list(self._on_disk().writers.values()):
            writer.store_staged()
