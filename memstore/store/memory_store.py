"""A memory: documents, their landmark index and their blocks in tiers, behind one object that never
sees a model.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.disk.files import remove_index
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.passage_parts import Keep
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import InvalidInput, MemoryLocked
from memstore.share.publication_options import is_url
from memstore.store.names_written import names_written
from memstore.store.stored_documents import StoredDocuments
from memstore.store.write import admission
from memstore.store.write.admission import Mode
from memstore.store.write_locks import all_written_here, remove_leftovers, written_here

if TYPE_CHECKING:  # imported where it is used: most commands need none of it
    from memstore.share.publish.publish import Report as Published
    from memstore.store.size_estimate import SizeEstimate
    from memstore.store.verify.report import Report
    from memstore.store.write.replace_selector import Find
    from memstore.store.write.writer import DocumentWriter


class MemoryStore(StoredDocuments):
    """One memory, open in this process; a context manager. Usable from several threads.

    `create`, `open` and `in_memory` (memstore.store.open_memory) open one; sessions look up in it
    (memstore.store.lookups); its documents are read (memstore.store.stored_documents), written,
    moved and checked. Documents that other processes add, change or forget are noticed at the next
    call. The landmark index and the tiers are built when something is first looked up or written;
    listing, moving and checking documents needs neither.
    """

    # Documents

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
        from memstore.store.write.writer import COMMIT_BYTES, DocumentWriter, InStore

        catalog, retrieval = committed.catalog, self._retrieve()
        with ExitStack() as locks:
            locks.enter_context(written_here(committed, name, wait=self._wait_for_writer))
            with catalog.database.read() as txn:
                catalog.check_selector(txn)
            wanted = admission.wanted(catalog, name, source_hash, settings, metadata)
            admitted = admission.admit(self._named(name), wanted, mode)
            if admitted is None:
                return None
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
        rows = list(committed.rows.by_number().values())
        wanted = admission.wanted(committed.catalog, name, source_hash, settings)
        return estimate_size(committed.catalog, rows, wanted, tokens, stored)

    def _store_staged(self) -> None:
        for writer in list(self._on_disk().writers.values()):
            writer.store_staged()

    def replace_selector(
        self,
        form: IndexSpec,
        find: "Find",
        progress: Callable[[int, int], None] = lambda done, documents: None,
    ) -> None:
        """Find every document by what another selector keeps, from now on.

        find: document -> pieces (first block, landmarks, words) one after the other that cover it,
        as DocumentWriter takes them; it is asked about one document after the other, also
        of those that are only partly read. progress: called with (documents done, documents).

        Until all of it is there, the memory is searched as before; interrupted, the next call with
        the same form goes on. Other stores of this memory, in whatever process, are told by
        WrongModel to open it anew. Raises InvalidInput (also for a memory without a selector),
        MemoryLocked (a document is being written), StorageFull, ReadOnlyMemory.
        """
        from memstore.store.write.replace_selector import replace_selector

        committed = self._writable()
        with all_written_here(committed, wait=self._wait_for_writer):
            table = replace_selector(committed.catalog, form, find, progress)
            self._selector = committed.catalog.runs = table
            if self._retrieval is not None:
                self._retrieval.select(table)
        self._refresh()

    # Transfer and care

    def export_document(self, name: str, file: Path | str) -> int:
        """Write one ready document to a file that `import_document` reads; return its bytes. It may
        take the place of an older export, never of anything else.

        Raises DocumentNotFound, InvalidInput, StorageFull, CorruptMemory.
        """
        from memstore.store.transfer.export_file import check_target
        from memstore.store.transfer.export_import import export_document

        catalog = self._on_disk().catalog
        check_target(Path(file))
        (document,) = self.ready([name])
        if is_url(self.place):
            from memstore.store.transfer.published_document import export_published

            return export_published(str(self.place), name, Path(file))
        return export_document(catalog, document, Path(file))

    def import_document(self, file: Path | str, name: str | None = None) -> Document:
        """Read an exported document, under another name if one is given; the same content under the
        same name is left as it is.

        Raises InvalidInput (no export, damaged, truncated), WrongModel, NewerFormat,
        DocumentExists, StorageFull, ReadOnlyMemory, MemoryLocked; the memory is as it was.
        """
        from memstore.store.transfer.export_file import read_head
        from memstore.store.transfer.export_import import import_document

        file = Path(file)
        original = read_head(file).document
        name = original.name if name is None else name
        admission.check_name(name)
        committed = self._writable()
        with written_here(committed, name, wait=self._wait_for_writer):
            found = admission.admit_import(self._named(name), original)
            if found is None:
                found = import_document(committed.catalog, file, name)
        self._refresh()
        return found

    def publish(
        self,
        url: str,
        names: Sequence[str] | None = None,
        *,
        keep: Keep = "kv",
        replace: bool = False,
        check: bool = False,
        grace: float | None = None,
        progress: Callable[[int, int], None] = lambda done, documents: None,
    ) -> "Published":
        """Publish the named documents, or every ready one, where a URL says (s3://, gs://, az://,
        file:///, memory://): see docs/sharing.md. What is there already is not sent again.

        keep: "text" for no keys and values of passages, which readers compute as they need them.
        replace: also in place of published documents of these names that hold other content.
        check: read what is published of the documents, and send again what is damaged.
        grace: seconds, where who prunes there gives another than 24 hours.
        progress: called with (documents done, documents).

        Raises InvalidInput, DocumentNotFound, DocumentExists, WrongModel, CorruptMemory,
        StoreUnavailable, MemoryNotFound (no such bucket).
        """
        from memstore.share.objects.open_object_store import open_object_store
        from memstore.share.publish.garbage_collection import GRACE
        from memstore.share.publish.publish import PublishOptions, publish

        catalog = self._on_disk().catalog
        if is_url(self.place):
            raise InvalidInput(f"{self.place} is published; publish from the memory's directory")
        documents = self.ready(names, to="publish")
        place = open_object_store(url, make=True)
        seconds = GRACE if grace is None else grace
        options = PublishOptions(keep=keep, replace=replace, check=check, grace=seconds)
        return publish(catalog, documents, place, options, progress)

    def pull(self, name: str, url: str, as_name: str | None = None) -> Document:
        """Read a published document into this memory, under another name if one is given; the same
        content under the same name is left as it is.

        Raises DocumentNotFound, StoreUnavailable, CorruptMemory, MemoryNotFound, and what
        import_document raises; the memory is as it was.
        """
        from memstore.store.transfer.published_document import pulled

        path = self._writable().catalog.database.path
        with pulled(url, name, path) as file:
            return self.import_document(file, as_name)

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without the room, and the bytes, that forgotten documents left; return
        its bytes before and after.

        Needs the memory to itself. Raises MemoryLocked, StorageFull, ReadOnlyMemory.
        """
        committed = self._writable()
        database = committed.catalog.database
        with database.writer():
            before = database.file_bytes
            committed.refresh()
            remove_leftovers(committed)
            database.write(committed.catalog.passages.drop_unreferenced, beyond_limit=True)
            database.rewrite()
            sizes = before, database.file_bytes
        committed.refresh()
        return sizes

    def verify(self, *, repair: bool = False) -> "Report":
        """Check everything that is stored, in a child process; with `repair`, drop damaged
        documents whole.

        For a memory that cannot be opened, use memstore.store.verify.verify_memory. Raises what
        that raises.
        """
        from memstore.store.verify.verify_memory import verify_memory

        committed = self._on_disk()
        if is_url(self.place):
            return verify_memory(str(self.place), repair=repair)
        path = committed.catalog.database.path
        if not repair:
            return verify_memory(path)
        self._writable()
        if names_written(path):
            raise MemoryLocked(
                f"{path} is being written by this process; finish that document first"
            )
        if self._retrieval is not None:
            self._retrieval.tiers.settle()
        committed.catalog.close()  # a repair of damaged pages needs the memory to itself
        try:
            return verify_memory(path, repair=True)
        finally:
            committed.reopened(Catalog.open(path, read_only=self._read_only))
