"""What is read of a memory: its documents, their text, and how much there is of all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from memstore.decode import T
from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import Keep, Passage
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import PassageCounts
from memstore.errors import InvalidInput
from memstore.store.document_rows import is_listed
from memstore.store.lookups import Lookups
from memstore.store.stored_passages import check_of_passages, read_passages
from memstore.store.stored_tokens import TokenSpan, read_tokens
from memstore.store.write import admission


class StoredDocuments(Lookups):
    """The verbs of MemoryStore that read and change nothing."""

    def documents(self) -> list[Document]:
        """Every document, ready or still being read, oldest first."""
        self._refresh()
        return [] if self._committed is None else self._committed.rows.listed()

    def readable(self) -> dict[int, Document]:
        """Every document by id, and those that left the memory a while ago: who has begun to read
        them goes on.
        """
        listed = {document.id: document for document in self.documents()}
        return listed if self._committed is None else {**self._committed.leaving, **listed}

    def ready(self, names: Sequence[str] | None = None, *, to: str | None = None) -> list[Document]:
        """The named documents, or every one that is read to its end, oldest first.

        to: what they are wanted for, where none at all is an error. Raises InvalidInput for a named
        one that is not read to its end, DocumentNotFound.
        """
        if names is None:
            found = [document for document in self.documents() if document.state == "ready"]
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
        files = [] if self.path is None else (self.path / "index").glob("*.[il]*")
        looked_up = {} if self._retrieval is None else self._retrieval.describe()
        index = {"kind": self._options.get("index", "auto"), "searches": 0, "rows": 0}
        model = self.signature.model
        return {
            "model": None if model is None else model.title,
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
