"""Following what is committed, by whichever process: the documents' rows, and what is held of them
to look up.
"""

import threading
from typing import TYPE_CHECKING

from memstore.disk.catalog import Catalog
from memstore.disk.document import Document
from memstore.store.admission import is_listed

if TYPE_CHECKING:
    from memstore.store.retrieval import Retrieval
    from memstore.store.writer import DocumentWriter


class Committed:
    """The documents of an open memory as `refresh` last saw them. Safe for several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.rows: dict[int, Document] = {}  # by id; ready, or being read for the first time
        self.seen = -1  # number of the last transaction that was followed
        self.writers: dict[int, DocumentWriter] = {}  # of this store, by document
        self._retrieval: Retrieval | None = None
        self._following = threading.RLock()

    def refresh(self) -> None:
        """See what was committed since; nearly free where nothing was. Raises CorruptMemory."""
        if self.catalog.database.last_transaction != self.seen:
            self.follow()

    def attach(self, retrieval: "Retrieval") -> None:
        """Have a retrieval follow too, from now on. Raises CorruptMemory, with nothing attached."""
        with self._following:
            self._retrieval = retrieval
            try:
                self.follow()
            except BaseException:
                self._retrieval = None
                raise

    def reopened(self, catalog: Catalog) -> None:
        """The memory was opened anew."""
        with self._following:
            self.catalog = catalog
            if self._retrieval is not None:
                self._retrieval.reopened(catalog)
            self.follow()

    def ended(self, writer: "DocumentWriter") -> None:
        """A writer of this store has committed what it will."""
        number = writer.document.id
        with self._following:
            with self.catalog.database.read() as txn:
                row = self.catalog.document(txn, number)
            self.writers.pop(number, None)
            if self._retrieval is not None:
                self._retrieval.written(row)
            self.follow()

    def follow(self) -> None:
        """Look at what is committed, whether or not something was. Raises CorruptMemory."""
        with self._following:
            # before reading: too old a number only costs another look
            last = self.catalog.database.last_transaction
            with self.catalog.database.read() as txn:
                rows = {row.id: row for row in self.catalog.documents(txn) if is_listed(row)}
                if self._retrieval is not None:
                    self._retrieval.follow(txn, rows, but=self.writers)
            self.rows = rows
            self.seen = last
