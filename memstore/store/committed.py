"""The committed documents of an open memory, whichever process wrote them: their rows, the search
data that is loaded for them, and the locks for writing one.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction, Version
from memstore.disk.tables.catalog import Catalog, Changes
from memstore.store.write.admission import Mode, admit

if TYPE_CHECKING:
    from memstore.store.retrieve.retrieval import Retrieval
    from memstore.store.write.writer import DocumentWriter


class Committed:
    """The documents of an open memory as `follow` last saw them. Safe for several threads.

    listed: the last result of `list_rows`, until a row changes. version: the version of the
    memory that `follow` saw last.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._rows: dict[int, Document] = {}  # in every state
        self._named: dict[str, set[int]] = {}  # name -> numbers
        self.listed: tuple[Document, ...] | None = None
        self._lock = threading.Lock()  # guards the rows
        self.writers: dict[int, DocumentWriter] = {}  # of this store, by document
        self.version = Version(0, -1)
        self._changes: Changes | None = None  # changes of rows that `follow` has seen
        self._retrieval: Retrieval | None = None
        self._following = threading.RLock()

    def list_rows(self) -> tuple[Document, ...]:
        """Rows that are ready or being ingested for the first time, oldest first."""
        with self._lock:
            rows = (row for row in self._rows.values() if row.is_listed)
            self.listed = tuple(sorted(rows, key=lambda row: row.id))
            return self.listed

    def named(self, name: str) -> list[Document]:
        """All rows of a name in every state, oldest first."""
        with self._lock:
            return [self._rows[number] for number in sorted(self._named.get(name, ()))]

    def attach(self, retrieval: "Retrieval") -> None:
        """Have `follow` update a retrieval, too. Raises CorruptMemory, with nothing attached."""
        with self._following:
            self.follow(retrieval)
            self._retrieval = retrieval

    def ended(self, writer: "DocumentWriter") -> None:
        """Take over what a writer of this store committed; it writes no more."""
        number = writer.document.id
        with self._following:
            with self.catalog.database.read() as txn:
                row = self.catalog.row(txn, number)
            self.writers.pop(number, None)
            if self._retrieval is not None:
                self._retrieval.written(number, row)
            self.follow()

    def begin(
        self, retrieval: "Retrieval", wanted: Document, mode: Mode, commit_bytes: int | None
    ) -> "DocumentWriter | None":
        """The writer of a document; None if the memory has the same content already.

        The writer holds the writer lock and the lock of the document's name until it is closed.
        Raises what MemoryStore.write_document raises.
        """
        from memstore.store.write.writer import DocumentWriter  # imports torch

        with ExitStack() as locks:
            locks.enter_context(self.writing(wanted.name))
            admitted = admit(self.named(wanted.name), wanted, mode)
            if admitted is None:
                return None
            held = ExitStack()  # the writer's locks

            def ended(writer: DocumentWriter) -> None:
                with held:
                    self.ended(writer)

            writer = DocumentWriter(self.catalog, retrieval, admitted, ended, commit_bytes)
            held.push(locks.pop_all())
            self.writers[writer.document.id] = writer
            return writer

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Hold the locks for writing under a name: no other process writes, and no other thread
        writes a document of this name. Raises MemoryLocked, ReadOnlyMemory.
        """
        database = self.catalog.database
        with database.name_written(name), database.writer():
            self.follow()
            yield

    def follow(self, new: "Retrieval | None" = None) -> None:
        """See what was committed; new: a retrieval that needs all rows. Raises CorruptMemory."""
        with self._following:
            # read before the rows: a version that is too old only costs another call
            version = self.catalog.database.version
            if version.file != self.version.file and self._retrieval is not None:
                self._retrieval.rewritten()
            with self.catalog.database.read() as txn:
                changes = self.catalog.changes(txn)
                changed = self._changed(txn, changes)
                if self._retrieval is not None:
                    self._retrieval.follow(txn, changed, but=self.writers)
                if new is not None:
                    new.follow(txn, self._rows | changed, but=self.writers)
            self._change(changed)
            self.version, self._changes = version, changes

    def _changed(self, txn: Transaction, changes: Changes) -> dict[int, Document | None]:
        """The rows that changed, in order of id; None for a deleted one."""
        numbers = changes.since(self._changes)
        if numbers is not None:
            return {number: self.catalog.row(txn, number) for number in sorted(numbers)}
        gone = dict.fromkeys(self._rows)
        return gone | {row.id: row for row in self.catalog.documents(txn)}

    def _change(self, changed: Mapping[int, Document | None]) -> None:
        with self._lock:
            for number, row in changed.items():
                old = self._rows.pop(number, None)
                if old is not None:
                    self._named[old.name].discard(number)
                    if not self._named[old.name]:
                        del self._named[old.name]
                if row is not None:
                    self._rows[number] = row
                    self._named.setdefault(row.name, set()).add(number)
            if changed:
                self.listed = None
