"""A memory: documents, their landmark index and their blocks in tiers, behind one object that never
sees a model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.disk.files import INDEX, remove_index
from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import Keep
from memstore.disk.tables.catalog import Catalog
from memstore.errors import InvalidInput, MemoryLocked
from memstore.paths import expanded
from memstore.share.publication_options import is_url
from memstore.store.names_written import names_written
from memstore.store.write import admission
from memstore.store.write_locks import remove_leftovers, written_here
from memstore.store.written_documents import WrittenDocuments

if TYPE_CHECKING:  # imported where it is used: most commands need none of it
    from memstore.share.objects.object_store import ObjectStore
    from memstore.share.publish.publish import PublishOptions
    from memstore.share.publish.publish import Report as Published
    from memstore.store.verify.report import Report


class MemoryStore(WrittenDocuments):
    """One memory, open in this process; a context manager. Usable from several threads.

    `create`, `open` and `in_memory` (memstore.store.open_memory) open one; sessions look up in it
    (memstore.store.lookups); its documents are read (memstore.store.stored_documents) and written
    (memstore.store.written_documents), moved and checked. Documents that other processes add,
    change or forget are noticed at the next call. The landmark index and the tiers are built when
    something is first looked up or written; listing, moving and checking documents needs neither.
    """

    def export_document(self, name: str, file: Path | str) -> int:
        """Write one ready document to a file that `import_document` reads; return its bytes. It may
        take the place of an older export, never of anything else.

        Raises DocumentNotFound, InvalidInput, StorageFull, CorruptMemory.
        """
        from memstore.store.transfer.export_file import check_target
        from memstore.store.transfer.export_import import export_document

        catalog = self._on_disk().catalog
        file = expanded(file)
        check_target(file)
        (document,) = self.ready([name])
        if is_url(self.place):
            from memstore.store.transfer.published_document import export_published

            return export_published(str(self.place), name, file)
        return export_document(catalog, document, file)

    def import_document(self, file: Path | str, name: str | None = None) -> Document:
        """Read an exported document, under another name if one is given; the same content under the
        same name is left as it is.

        Raises InvalidInput (no export, damaged, truncated), WrongModel, NewerFormat,
        DocumentExists, StorageFull, ReadOnlyMemory, MemoryLocked; the memory is as it was.
        """
        from memstore.store.transfer.export_file import read_head
        from memstore.store.transfer.export_import import import_document

        file = expanded(file)
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
        report = publish(catalog, documents, place, options, progress)
        lists = catalog.database.path / INDEX
        if catalog.index_spec is not None and lists.exists():
            from memstore.index.passage_directory import PassageDirectory
            from memstore.store.retrieve.published_lists import carry

            carry(PassageDirectory(lists), place, catalog.index_spec.digest)
        return report

    def stage(self, objects: "ObjectStore", key: str, options: "PublishOptions") -> str:
        """Send every ready document for a manifest that somebody writes who has what others stage,
        too; return the staged object. Raises as `publish` does.
        """
        from memstore.share.publish.staging import stage

        return stage(self._on_disk().catalog, self.ready(), objects, key, options)

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
            if (database.path / INDEX).exists() and self._retrieve().tells_of_gone():
                remove_index(database.path)
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
