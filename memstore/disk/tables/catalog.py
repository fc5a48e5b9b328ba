"""All tables of a memory as one object, and its own: the memory's description and its documents.

Every method takes a transaction, so that related changes are committed together.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec

from memstore.decode import Amount, Count, Positive, T, typed, unpack
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document, WriteId
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.transaction import document_range, number_key, read_number_key
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.runs import IndexSpec, RunTable
from memstore.disk.tables.texts import (
    Digest,
    Passage,
    PassageCounts,
    PassageTable,
    StoredPassage,
    TextTable,
    digest_of,
)
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    InvalidConfig,
    InvalidInput,
    MissingBlock,
    NewerFormat,
    OlderFormat,
)

FORMAT = 11
_MOST_KNOWN = 4096  # cached rows, and cached write ids
_CHANGES = b"changes"  # key in the table `meta`
_KEPT = 200  # stored changes; a longer value would not fit into its leaf page


class Description(msgspec.Struct):
    """The row that describes a memory."""

    format: Positive
    signature: dict[str, Any]
    codec: str
    created: Amount
    selector: IndexSpec | None  # the search data of its selector, if it has one


class Changes(NamedTuple):
    """Log of the latest changes of documents' rows, written in the same transactions. With it a
    process reads only the rows that changed since its last look; if it is damaged or missing, all
    rows.
    """

    series: bytes  # 8 random bytes, drawn again when counting restarts
    last: Count  # number of the last change, 0 before the first
    documents: tuple[Count, ...] = ()  # ids of changed rows, the latest last

    def since(self, seen: "Changes | None") -> set[int] | None:
        """The documents whose rows changed since `seen`; None if unknown."""
        if seen is None or not seen.last or seen.series != self.series:
            return None
        missed = self.last - seen.last
        if not 0 <= missed <= len(self.documents):
            return None
        return set(self.documents[len(self.documents) - missed :])


class StoredAt(NamedTuple):
    """The place of a block's records, stored or not."""

    number: int
    block: int
    stored: bool = True
    digest: Digest = b""  # digest of a passage


class Catalog:
    """The tables of one memory, over its database.

    source: the tier that reads blocks of a published memory (memstore.share), whose landmark keys
    are loaded by their first search; None for a directory.
    """

    source: Any = None

    def __init__(self, database: Database) -> None:
        """Read the memory's own row. Raises NewerFormat, OlderFormat, CorruptMemory."""
        self.database = database
        with database.read() as txn:
            row = self._description(txn)
        if isinstance(row.get("format"), int) and row["format"] != FORMAT:
            if row["format"] > FORMAT:
                raise NewerFormat(
                    f"{database.path} is in format {row['format']}, this version reads {FORMAT}; "
                    "update memstore"
                )
            raise OlderFormat(
                f"{database.path} was made by an older version; ingest the documents again "
                "(memstore ingest)"
            )
        try:
            known = typed(row, Description)
            self.signature = Signature.from_dict(known.signature)
            self.blocks = BlockTable(self.signature, known.codec)
            self.codec = self.blocks.codec  # for new blocks
            self.passages = PassageTable(self.blocks)
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{database.path}: its own description is damaged ({error}); restore it from a copy"
            ) from error
        self.index_spec = known.selector  # None for a memory without a selector
        self.runs = RunTable(self.signature.geometry, known.selector)
        self.texts = TextTable(self.signature.block_size)
        self._writes: dict[int, WriteId] = {}  # write ids by document, which never change
        self._rows: dict[int, tuple[bytes, Document]] = {}  # by number: encoded and decoded row

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        selector: IndexSpec | None = None,
    ) -> "Catalog":
        """Make a new memory in `path` (a directory that is absent or empty) and open it for
        writing.

        selector: the data that a selector searches; None for landmark keys of the model's own
        layers. A kill at any point leaves a whole memory or none, and creating can be tried again.

        Raises MemoryExists, InvalidInput (not an empty directory; a network file system),
        InvalidConfig (codec), ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        if selector is not None and (signature.memory_layers, signature.num_kv_heads) != ((0,), 1):
            raise InvalidInput(
                "a memory of passages stores one record a passage: its signature has one memory "
                "layer, 0, and one KV head"
            )
        row = {
            "format": FORMAT,
            "signature": signature.to_dict(),
            "codec": get_codec(codec).name,
            "created": time.time(),
            "selector": None if selector is None else asdict(selector),
        }

        def first(txn: Transaction) -> None:
            txn.put_checked("meta", b"memory", msgpack.packb(row))
            txn.put_checked("meta", b"next_document", msgpack.packb(1))

        return cls(Database.create(path, first))

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> "Catalog":
        """Open the memory in `path`. Raises what Database.open and Catalog raise."""
        database = Database.open(path, read_only=read_only)
        try:
            return cls(database)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Close the database; idempotent."""
        self.database.close()

    @property
    def manifest(self) -> int | None:
        """The manifest's number of a published memory; None for a directory."""
        return None

    # Documents

    def new_number(self, txn: Transaction) -> int:
        """A new number for a document or passage, never used before by a committed transaction.
        Raises CorruptMemory.
        """
        number = self.next_number(txn)
        txn.put_checked("meta", b"next_document", msgpack.packb(number + 1))
        return number

    def next_number(self, txn: Transaction) -> int:
        """The number of the next document or passage. Raises CorruptMemory."""
        value = txn.get_checked("meta", b"next_document")
        return self._unpack(value, Count, "its count of documents")

    def documents(self, txn: Transaction) -> list[Document]:
        """All documents' rows, in every state, in order of id."""
        return [
            self._document(read_number_key(key), value)
            for key, value in txn.scan_checked("documents", number_key(1))
        ]

    def changes(self, txn: Transaction) -> Changes:
        """The latest changes of rows."""
        try:
            return unpack(txn.get_checked("meta", _CHANGES) or b"", Changes)
        except (CorruptMemory, ValueError):
            return Changes(os.urandom(8), 0)

    def _note_change(self, txn: Transaction, document: int) -> None:
        """Record that this transaction writes or deletes a document's row."""
        series, last, before = self.changes(txn)
        value = (series, last + 1, (*before, document)[-_KEPT:])
        txn.put_checked("meta", _CHANGES, msgpack.packb(value))

    def document(self, txn: Transaction, number: int) -> Document:
        """One document by id. Raises DocumentNotFound."""
        row = self.row(txn, number) if number > 0 else None
        if row is None:
            raise self._forgotten(number)
        return row

    def row(self, txn: Transaction, document: int) -> Document | None:
        """A document's row by id, or None."""
        value = txn.get_checked("documents", number_key(document))
        if value is None:
            return None
        known = self._rows.get(document)
        if known is None or known[0] != value:  # decode a row only when it changed
            if len(self._rows) >= _MOST_KNOWN:
                self._rows.clear()
            known = self._rows[document] = value, self._document(document, value)
        return known[1]

    def put_document(self, txn: Transaction, document: Document) -> None:
        """Write a document's new or changed row."""
        row = asdict(document)
        txn.put_checked("documents", number_key(row.pop("id")), msgpack.packb(row))
        self._note_change(txn, document.id)

    def write_of(self, txn: Transaction, number: int) -> WriteId:
        """The write id of a document's records, or the digest of a passage. Raises
        DocumentNotFound, MissingBlock (a passage without stored records).
        """
        if number > 0 and txn.view("documents", number_key(number)) is not None:
            write = self._writes.get(number)
            if write is None:  # read a row once, not at every batch
                if len(self._writes) >= _MOST_KNOWN:
                    self._writes.clear()  # also drops deleted documents
                write = self._writes[number] = self.document(txn, number).write
            return write
        passage = self.passages.row(txn, number) if number > 0 else None
        if passage is None:
            raise self._forgotten(number)
        if not passage.bytes:
            raise MissingBlock(f"no keys and values of passage {number} are stored")
        return passage.digest

    def delete_document(self, txn: Transaction, document: int) -> None:
        """Delete a document's blocks, landmark keys, tokens and row, and its references to
        passages.
        """
        with suppress(CorruptMemory):  # a repair recounts references that cannot be read
            row = self.row(txn, document)
            if row is not None and row.of_passages:
                for _, digest in list(self.digests_of(txn, row)):
                    self.passages.release(txn, digest)
        self.blocks.delete(txn, document)
        for table in ("landmarks", "tokens", "documents"):
            txn.delete_range(table, *document_range(document))
        self._note_change(txn, document)

    # Passages

    def digests(self, document: Document, passages: Iterable[Passage]) -> list[Digest]:
        """The digests of passages of a document."""
        signature = self.signature.digest
        return [digest_of(signature, document.codec, passage.ids) for passage in passages]

    def refer(
        self, txn: Transaction, document: Document, first_block: int, digests: Sequence[Digest]
    ) -> list[StoredPassage]:
        """Count a document's references to the passages of its blocks from `first_block` on."""
        return self.passages.refer(txn, document.id, first_block, digests, self.new_number)

    def passages_of(
        self, txn: Transaction, document: Document, first: int = 0
    ) -> Iterator[tuple[int, StoredPassage]]:
        """(block, row of its passage) of a document of passages, from block `first` on. Raises
        CorruptMemory for a missing row.
        """
        for block, digest in self.digests_of(txn, document, first):
            row = self.passages.find(txn, digest)
            if row is None:
                raise CorruptMemory(_no_passage(document, block))
            yield block, row

    def record_bytes(self, txn: Transaction, document: Document) -> int:
        """Bytes of a document's records, or of those of its passages. Raises CorruptMemory."""
        if document.of_passages:
            return sum(passage.bytes for _, passage in self.passages_of(txn, document))
        return sum(len(data) for _, data in self.blocks.walk(txn, document.id))

    def digests_of(
        self, txn: Transaction, document: Document, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Digest]]:
        """(block, digest of its passage) for blocks `first` to `end` (exclusive) of a document of
        passages. Raises CorruptMemory.
        """
        signature, codec = self.signature.digest, document.codec
        for part in self.texts.passage_parts(txn, document.id, first, end):
            for block, passage in enumerate(part.passages, part.first_block):
                if first <= block and (end is None or block < end):
                    yield block, digest_of(signature, codec, passage.ids)

    def counts(self) -> PassageCounts:
        """Counts of its passages. Raises CorruptMemory."""
        with self.database.read() as txn:
            return self.passages.counts(txn)

    def stored_at(
        self, txn: Transaction, places: Sequence[tuple[int, int]]
    ) -> list[StoredAt | None]:
        """The places of records of (document, block): a passage's records have the passage's
        number; None for a passage without a row. Raises DocumentNotFound, CorruptMemory.
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
            digest = dict(self.digests_of(txn, row, block, block + 1)).get(block)
            if digest is None:
                raise CorruptMemory(f"{self.database.path}: {_no_passage(row, block)}")
            found.append(self._passage_at(txn, digest, document, block))
        return found

    def _passage_at(
        self, txn: Transaction, digest: Digest, document: int, block: int
    ) -> StoredAt | None:
        """The place of the records of the passage in a block."""
        try:
            row = self.passages.find(txn, digest)
        except CorruptMemory:  # the passage can be computed from its tokens
            return None
        return None if row is None else StoredAt(row.number, 0, row.bytes > 0, digest)

    def share(self, digest: Digest, codec: str, k: Any, v: Any) -> None:
        """Share a computed passage with other readers; does nothing for a directory."""

    def bring(self, txn: Transaction, documents: Sequence[int], table: str) -> None:
        """Prefetch the values of these documents in a table; does nothing for a directory."""

    def _description(self, txn: Transaction) -> dict[str, Any]:
        value = txn.get_checked("meta", b"memory")
        return self._unpack(value, dict[str, Any], "its own description")

    def _unpack(self, value: bytes | None, form: type[T], what: str) -> T:
        if value is None:
            raise CorruptMemory(f"{self.database.path} lacks {what}; restore it from a copy")
        try:
            return unpack(value, form)
        except ValueError as error:
            raise CorruptMemory(
                f"{self.database.path}: {what} is damaged ({error}); restore it from a copy"
            ) from error

    def _forgotten(self, number: int) -> DocumentNotFound:
        return DocumentNotFound(
            f"document {number} is not in {self.database.path}: it was removed or changed; list "
            "the memory's documents again"
        )

    def _document(self, number: int, value: bytes) -> Document:
        try:
            return Document.decode(unpack(value, dict[str, Any]) | {"id": number})
        except ValueError as error:
            raise CorruptMemory(
                f"{self.database.path}: the row of document {number} is damaged ({error}); run "
                "verify --repair"
            ) from error


def _no_passage(document: Document, block: int) -> str:
    return f"passage {block} of document {document.name!r} is not stored; run verify --repair"
