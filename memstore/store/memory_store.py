"""A memory: documents, their landmark index and their blocks in tiers, behind one object that never
sees a model.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.decode import T
from memstore.disk.files import remove_index
from memstore.disk.format.document import Document, IngestSettings, is_of_prompt
from memstore.disk.format.index_spec import SelectorForm
from memstore.disk.format.passage_parts import Keep, Passage
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import PassageCounts
from memstore.errors import InvalidInput, MemoryLocked
from memstore.share.publication_options import is_url
from memstore.store.document_rows import is_listed
from memstore.store.lookups import Lookups
from memstore.store.names_written import names_written
from memstore.store.stored_passages import check_of_passages, read_passages
from memstore.store.stored_tokens import TokenSpan, read_tokens
from memstore.store.write import admission
from memstore.store.write.admission import Mode
from memstore.store.write_locks import all_written_here, remove_leftovers, written_here

if TYPE_CHECKING:  # imported where it is used: most commands need none of it
    from memstore.share.publish.publish import Report as Published
    from memstore.store.size_estimate import Forecast
    from memstore.store.verify.report import Report
    from memstore.store.write.replace_selector import Find
    from memstore.store.write.writer import DocumentWriter


class MemoryStore(Lookups):
    """One memory, open in this process; a context manager. Usable from several threads.

    `create`, `open` and `in_memory` (memstore.store.open_memory) open one; sessions look up in it
    (memstore.store.lookups). Documents that other processes add, change or forget are noticed at
    the next call. The landmark index and the tiers are built when something is first looked up or
    written; listing, moving and checking documents needs neither.
    """

    # Documents

    def documents(self) -> list[Document]:
        """Every document, ready or still being read, oldest first."""
        self._refresh()
        return [] if self._committed is None else self._committed.rows.listed()

    def ready(self, names: Sequence[str] | None = None, *, to: str | None = None) -> list[Document]:
        """The named documents, or every one that is read to its end, oldest first; none that holds
        what did not fit into a prompt, unless it is named.

        to: what they are wanted for, where none at all is an error. Raises InvalidInput for a named
        one that is not read to its end, DocumentNotFound.
        """
        if names is None:
            found = [
                document
                for document in self.documents()
                if document.state == "ready" and not is_of_prompt(document.name)
            ]
            if to is not None and not found:
                raise InvalidInput(
                    f"the memory holds no finished document to {to}; run ingest first"
                )
            return found
        if isinstance(names, str):  # or its letters would be looked for
            raise InvalidInput(f"documents are given as a list of names: [{names!r}]")
        found = [self.document(name) for name in names]
        for document in found:
            if document.state != "ready":
                raise InvalidInput(
                    f"document {document.name!r} is only partly read; run ingest again to finish it"
                )
        return found

    def has(self, name: str) -> bool:
        """Is there a document of this name, ready or still being read?"""
        return any(map(is_listed, self._named(name)))

    def document(self, name: str) -> Document:
        """One document by name. Raises DocumentNotFound, which lists the names there are."""
        for row in self._named(name):
            if is_listed(row):
                return row
        raise admission.no_document(name, self.documents(), self.place)

    def _named(self, name: str) -> list[Document]:
        self._refresh()
        return [] if self._committed is None else self._committed.rows.named(name)

    def tokens(self, document: str | int, first: int = 0, end: int | None = None) -> TokenSpan:
        """Content tokens `first` to `end` of a document (by name or id), and where their characters
        begin; of a document of passages all that are stored of each, one after the other, without
        the places of characters: for these see `passages`.

        Raises DocumentNotFound, CorruptMemory.
        """
        return self._read(document, partial(read_tokens, first=first, end=end))

    def passages(
        self, document: str | int, first: int = 0, end: int | None = None
    ) -> list[Passage]:
        """Passages `first` to `end` of a document (by name or id), a block each.

        Raises DocumentNotFound, CorruptMemory, InvalidInput for a document that is not made of
        passages.
        """
        return self._read(document, partial(read_passages, first=first, end=end))

    def kept(self, passages: Sequence[Passage]) -> list[Keep | None]:
        """What is kept of each of these passages in the memory's codec, whatever documents hold it;
        None of one that none does. Raises CorruptMemory.
        """
        catalog = self._on_disk().catalog
        with catalog.database.read() as txn:
            rows = [catalog.passages.find(txn, one) for one in catalog.digests(None, passages)]
        return [None if row is None else "kv" if row.bytes else "text" for row in rows]

    def tail(self, document: str | int) -> str:
        """The text of a document of passages behind its last one. Raises what `passages` raises."""

        def read(catalog: Catalog, txn: Transaction, row: Document) -> str:
            check_of_passages(row)
            return catalog.tail(txn, row)

        return self._read(document, read)

    def _read(self, document: str | int, read: Callable[[Catalog, Transaction, Document], T]) -> T:
        """What is read of a document in one transaction. Raises DocumentNotFound."""
        catalog = self._on_disk().catalog
        while True:  # a document that was replaced meanwhile has its name under another number
            number = self.document(document).id if isinstance(document, str) else document
            with catalog.database.read() as txn:
                named = isinstance(document, str)
                row = catalog.row(txn, number) if named else catalog.document(txn, number)
                if row is not None:
                    return read(catalog, txn, row)

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
        from memstore.store.write.writer import COMMIT_BYTES, DocumentWriter

        catalog, retrieval = committed.catalog, self._retrieve()
        with ExitStack() as locks:
            locks.enter_context(written_here(committed, name, wait=self._wait_for_writer))
            with catalog.database.read() as txn:
                catalog.check_selector(txn)
            wanted = Document(
                0,
                name,
                "ingesting",
                source_hash=source_hash,
                metadata=metadata or {},
                settings=settings,
                layers=admission.layers_of(settings, self.signature),
                codec=admission.codec_of(settings, committed.catalog.codec),
            )
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
                locks=held,
                make_room=self._store_staged,
                on_close=committed.ended,
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

    def forecast(
        self,
        name: str,
        tokens: int,
        *,
        source_hash: str,
        settings: IngestSettings,
        mode: Mode = "new",
        stored: int = 0,
    ) -> "Forecast | None":
        """What a document of about so many tokens will be here, before it is written; None if the
        same content is there already. stored: tokens of it whose passages are stored, which cost
        nothing (`kept`). The rest as for write_document.

        Raises StorageFull if the quota or the disk have no room for it.
        """
        from memstore.store.size_estimate import forecast

        if self.path is None:
            self._writable()  # refuses
        for row in self._named(name):
            if admission.is_there(row, source_hash, settings, mode):
                return None
        committed = self._on_disk()
        rows = list(committed.rows.by_number().values())
        layers = admission.layers_of(settings, self.signature)
        wanted = Document(
            0,
            name,
            "ingesting",
            source_hash=source_hash,
            settings=settings,
            layers=layers,
            codec=admission.codec_of(settings, committed.catalog.codec),
        )
        return forecast(committed.catalog, rows, wanted, tokens, stored)

    def _store_staged(self) -> None:
        for writer in list(self._on_disk().writers.values()):
            writer.store_staged()

    def replace_selector(
        self,
        form: SelectorForm,
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
        file:///, memory://): see docs/share.md. What is there already is not sent again.

        keep: "text" for no keys and values of passages, which readers compute as they need them.
        replace: also in place of published documents of these names that hold other content.
        check: read what is published of the documents, and send again what is damaged.
        grace: seconds, where who prunes there gives another than 24 hours.
        progress: called with (documents done, documents).

        Raises InvalidInput, DocumentNotFound, DocumentExists, WrongModel, CorruptMemory,
        StoreUnavailable, MemoryNotFound (no such bucket).
        """
        from memstore.share.objects.open_object_store import open_place
        from memstore.share.publish.garbage_collection import GRACE
        from memstore.share.publish.publish import publish

        catalog = self._on_disk().catalog
        if is_url(self.place):
            raise InvalidInput(f"{self.place} is published; publish from the memory's directory")
        documents = self.ready(names, to="publish")
        place = open_place(url, make=True)
        return publish(
            catalog,
            documents,
            place,
            keep=keep,
            replace=replace,
            check=check,
            grace=GRACE if grace is None else grace,
            progress=progress,
        )

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

    def stats(self) -> dict[str, Any]:
        """What the memory holds and what was looked up since it was opened, as plain values.

        "bytes" are those of the records. "passages": how many different ones there are, of how many
        of them keys and values are stored, their bytes, those of them that are referred to more
        than once, the bytes that they may take, and how many sessions computed, among them damaged
        ones and such as a published memory could not be asked for. "landmarks" are the bytes of
        landmark keys in main memory. Where nothing was looked up yet there are no "tiers".
        """
        documents = self.documents()
        held = PassageCounts() if self._committed is None else self._on_disk().catalog.counts()
        ready = sum(document.blocks for document in documents if document.state == "ready")
        files = [] if self.path is None else (self.path / "index").glob("*.idx")
        looked_up = {} if self._retrieval is None else self._retrieval.describe()
        index = {"kind": self._options.get("index", "auto"), "searches": 0, "rows": 0}
        return {
            "documents": len(documents),
            "tokens": sum(document.tokens for document in documents),
            "blocks": sum(document.blocks for document in documents),
            "bytes": sum(document.bytes for document in documents if not document.of_passages)
            + held.bytes,
            "passages": {
                "different": held.passages,
                "stored": held.stored,
                "bytes": held.bytes,
                "shared_bytes": held.shared,
                "kv_budget": self.kv_budget,
                "computed": looked_up.get("computed", 0),
                "damaged": looked_up.get("damaged", 0),
                "away": looked_up.get("away", 0),
            },
            "file_bytes": 0
            if self._committed is None
            else self._on_disk().catalog.database.file_bytes,
            "quota": self.quota,
            "codec": self.codec,
            "manifest": self.manifest,
            "landmarks": looked_up.get("landmarks", 0),
            "tiers": looked_up.get("tiers", {}),
            "prefetch": looked_up.get("prefetch", {"predictor": self.predictor}),
            "index": {
                **index,
                **looked_up.get("index", {}),
                "landmarks": {
                    layer: ready for layer in self.signature.memory_layers if self.selector is None
                },
                "file_bytes": sum(file.stat().st_size for file in files),
            },
        }
