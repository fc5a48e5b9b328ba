"""The passages that documents refer to: by what each is known, and where its records lie; and the
writes that records were made by.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memstore.disk.format.document import Document, Write
from memstore.disk.format.keys import document_key
from memstore.disk.format.text_parts import Passage
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.document_table import DocumentTable
from memstore.disk.tables.passage_table import (
    Digest,
    PassageCounts,
    PassageTable,
    StoredPassage,
    digest_of,
)
from memstore.disk.tables.text_table import TextTable
from memstore.errors import CorruptMemory, DocumentNotFound, MissingBlock

_MOST = 4096  # documents whose writes are remembered


class StoredAt(NamedTuple):
    """Where records of a block lie, or would."""

    number: int
    block: int
    stored: bool = True
    digest: Digest = b""  # of a passage


class DocumentPassages(DocumentTable, TextTable):
    """The passages of one memory's documents."""

    blocks: BlockTable
    passages: PassageTable
    # of each document: its row as it was read last, and the writes that it tells of
    _writes: dict[int, tuple[bytes, tuple[Write, ...]]]

    def writes(self, txn: Transaction, document: int) -> tuple[Write, ...]:
        """The writes that a document was made by; of a passage's number its digest, as one. Raises
        DocumentNotFound, MissingBlock (a passage of which no records are stored).

        Told anew only when the row is another: readers ask at every batch.
        """
        value = txn.get("documents", document_key(document)) if document > 0 else None
        if value is None and document > 0:
            passage = self.passages.row(txn, document)
            if passage is not None and passage.bytes:
                return (Write(0, passage.digest),)
            if passage is not None:
                raise MissingBlock(f"no keys and values of passage {document} are stored")
        if value is None:
            raise DocumentNotFound(
                f"document {document} is not in {self.database.path}: it was forgotten"
            )
        row, writes = self._writes.get(document, (None, ()))
        if row != value:
            known = self.row(txn, document)
            writes = () if known is None else known.writes
            if len(self._writes) >= _MOST:
                self._writes.clear()  # documents that are gone, too
            self._writes[document] = value, writes
        return writes

    def digests(self, document: Document | None, passages: Iterable[Passage]) -> list[Digest]:
        """By what passages of a document are known; None: of one that comes."""
        signature, codec = (
            self.signature.digest,
            self.blocks.codec if document is None else document.codec,
        )
        return [digest_of(signature, codec, passage.ids) for passage in passages]

    def refer(
        self, txn: Transaction, document: Document, first_block: int, digests: Sequence[Digest]
    ) -> list[StoredPassage]:
        """Count a document's references to passages, from its block `first_block` on."""
        numbers = self.new_numbers(txn)
        return self.passages.refer(txn, document.id, first_block, digests, numbers)

    def passages_of(
        self, txn: Transaction, document: Document, first: int = 0
    ) -> Iterator[tuple[int, StoredPassage]]:
        """The blocks of a document of passages from `first` on, and what is told of the passage of
        each. Raises CorruptMemory where that is nothing.
        """
        for block, digest in self.digests_of(txn, document, first):
            row = self.passages.find(txn, digest)
            if row is None:
                raise CorruptMemory(_no_passage(document, block))
            yield block, row

    def record_bytes(self, txn: Transaction, document: Document) -> int:
        """Of the records that a document has, or whose passages it refers to. Raises
        CorruptMemory.
        """
        if document.of_passages:
            return sum(passage.bytes for _, passage in self.passages_of(txn, document))
        return sum(len(record.data) for record in self.blocks.walk(txn, document.id))

    def digests_of(
        self, txn: Transaction, document: Document, first: int = 0
    ) -> Iterator[tuple[int, Digest]]:
        """The blocks of a document of passages from `first` on, and by what each is known. Raises
        CorruptMemory.
        """
        for part in self.passage_parts(txn, document.id, first):
            digests = self.digests(document, part.passages)
            for block, digest in enumerate(digests, part.first_block):
                if first <= block < document.blocks:
                    yield block, digest

    def counts(self) -> PassageCounts:
        """Its passages, counted. Raises CorruptMemory."""
        with self.database.read() as txn:
            return self.passages.counts(txn)

    def sweep(self) -> None:
        """Delete passages that were kept for a writer alone, which has ended. Raises what
        Database.write raises.
        """
        left = self.passages.take_left()
        if left:
            self.database.write(lambda txn: self.passages.sweep(txn, left), beyond_limit=True)

    def stored_at(
        self, txn: Transaction, places: Sequence[tuple[int, int]]
    ) -> list[StoredAt | None]:
        """Where records lie, of blocks (document, block): those of a passage under its own number;
        None where nothing is told of it. Raises DocumentNotFound, CorruptMemory.
        """
        rows: dict[int, Document] = {}
        found: list[StoredAt | None] = []
        for document, block in places:
            if document not in rows:
                rows[document] = self.document(txn, document)
            row = rows[document]
            if not row.of_passages:
                found.append(StoredAt(document, block))
                continue
            part = next(self.passage_parts(txn, document, block, block + 1), None)
            if part is None or not part.first_block <= block < part.end_block:
                raise CorruptMemory(f"{self.database.path}: {_no_passage(row, block)}")
            (digest,) = self.digests(row, [part.passages[block - part.first_block]])
            found.append(self._passage_at(txn, digest, document, block))
        return found

    def _passage_at(
        self, txn: Transaction, digest: Digest, document: int, block: int
    ) -> StoredAt | None:
        """Where those of a passage that stands there lie, or would."""
        try:
            row = self.passages.find(txn, digest)
        except CorruptMemory:  # its tokens say all that there is to it
            return None
        return None if row is None else StoredAt(row.number, 0, row.bytes > 0, digest)

    def release(self, txn: Transaction, document: Document, first: int) -> int:
        """Give up a document's references from block `first` on; the bytes of their records."""
        freed = 0
        for part in list(self.passage_parts(txn, document.id, first)):
            low = max(0, first - part.first_block)
            for digest in self.digests(document, part.passages[low:]):
                freed += self.passages.release(txn, digest)
        return freed


def _no_passage(document: Document, block: int) -> str:
    return f"passage {block} of document {document.name!r} is not stored; run verify --repair"
