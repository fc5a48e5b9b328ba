"""The rows of a memory's documents, and the numbers that documents and passages get."""

from collections.abc import Iterator
from dataclasses import asdict

import msgpack

from memstore.decode import Count, T, unpack
from memstore.disk.format.document import Document
from memstore.disk.format.keys import document_key, read_document_key
from memstore.disk.lmdb.database import Database
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.changes import Changes, note_change, read_changes
from memstore.errors import CorruptMemory, DocumentNotFound


class DocumentTable:
    """The documents of one memory. Every method takes the transaction it works in."""

    database: Database

    def new_document_id(self, txn: Transaction) -> int:
        """The next number: see new_numbers."""
        return next(self.new_numbers(txn))

    def new_numbers(self, txn: Transaction) -> Iterator[int]:
        """Numbers for documents and passages, never given out before (unless the transaction is not
        committed). Raises CorruptMemory.
        """
        while True:
            number = self.next_number(txn)
            txn.put_checked("meta", b"next_document", msgpack.packb(number + 1))
            yield number

    def next_number(self, txn: Transaction) -> int:
        """The number that the next document or passage gets. Raises CorruptMemory."""
        value = txn.get_checked("meta", b"next_document")
        return self._unpack(value, Count, "its count of documents")

    def documents(self, txn: Transaction) -> list[Document]:
        """Every document's row, whatever its state, in order of id."""
        return [
            self._document(read_document_key(key), value)
            for key, value in txn.scan_checked("documents", document_key(1))
        ]

    def changes(self, txn: Transaction) -> Changes:
        """Whose rows changed last."""
        return read_changes(txn)

    def document(self, txn: Transaction, which: str | int) -> Document:
        """One document by id, or by name if it is ready or being read for the first time. Raises
        DocumentNotFound, which lists the names there are.
        """
        if isinstance(which, int):
            value = txn.get_checked("documents", document_key(which)) if which > 0 else None
            if value is not None:
                return self._document(which, value)
        documents = [row for row in self.documents(txn) if row.state in ("ready", "ingesting")]
        for document in documents:
            if document.name == which:
                return document
        names = ", ".join(repr(d.name) for d in documents[:20]) + (
            ", ..." if len(documents) > 20 else ""
        )
        what = f"no document {which!r} in {self.database.path}"
        raise DocumentNotFound(
            f"{what}; there are {names}" if documents else f"{what}; it holds no documents"
        )

    def row(self, txn: Transaction, document: int) -> Document | None:
        """A document's row by id, or None."""
        value = txn.get_checked("documents", document_key(document))
        return None if value is None else self._document(document, value)

    def put_document(self, txn: Transaction, document: Document) -> None:
        """Write a document's row, new or changed."""
        row = asdict(document)
        txn.put_checked("documents", document_key(row.pop("id")), msgpack.packb(row))
        note_change(txn, document.id)

    def _unpack(self, value: bytes | None, form: type[T], what: str) -> T:
        if value is None:
            raise CorruptMemory(f"{self.database.path} lacks {what}; restore it from a copy")
        try:
            return unpack(value, form)
        except ValueError as error:
            raise CorruptMemory(
                f"{self.database.path}: {what} is damaged ({error}); restore it from a copy"
            ) from error

    def _document(self, number: int, value: bytes) -> Document:
        try:
            return Document.unpack(number, value)
        except ValueError as error:
            raise CorruptMemory(
                f"{self.database.path}: the row of document {number} is damaged ({error}); run "
                "verify --repair"
            ) from error
