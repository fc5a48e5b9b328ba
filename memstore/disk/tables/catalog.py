"""The tables beside the blocks: the memory's signature, its documents and their states, tokens, and
landmark keys.

Every method takes the transaction it works in, so that what belongs together is committed together:

    def commit(txn: Transaction) -> None:              # may be run again after the map has grown:
    see Database.write
        for layer, (k, v) in enumerate(chunk):
            for at, record in enumerate(catalog.blocks.encode(key, k, v, lengths, write)):
                size += catalog.blocks.put(txn, key._replace(block=key.block + at), record)
        catalog.put_tokens(txn, document.id, first_token, char_start, ids)
        catalog.put_landmarks(txn, document.id, layer, first_block, keys)
        catalog.put_document(txn, replace(document, tokens=..., blocks=..., bytes=...))

    catalog.database.write(commit)

    with catalog.database.read() as txn:
        documents = catalog.documents(txn)
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from memstore.decode import Amount, Count, Positive, T, typed, unpack
from memstore.disk.format.codec import codec_for_new
from memstore.disk.format.document import Document, Write
from memstore.disk.format.index_spec import SelectorForm
from memstore.disk.format.keys import (
    document_key,
    document_range,
    landmarks_key,
    read_document_key,
    read_tokens_key,
    tokens_key,
)
from memstore.disk.format.landmarks import LandmarkRun, decode_run, encode_run
from memstore.disk.format.passage_parts import (
    Passage,
    PassageOrder,
    PassagePart,
    decode_part,
    encode_part,
)
from memstore.disk.format.runs import Run
from memstore.disk.format.signature import Signature
from memstore.disk.format.token_parts import TokenPart, decode_tokens, encode_tokens, equal_lengths
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.changes import Changes, note_change, read_changes
from memstore.disk.tables.passage_records import PassageRecords
from memstore.disk.tables.passage_rows import Digest, StoredPassage, digest_of
from memstore.disk.tables.passage_table import PassageCounts, PassageTable
from memstore.disk.tables.selector_table import CURRENT, NEXT, SelectorTable
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    InvalidConfig,
    InvalidInput,
    MissingBlock,
    NewerFormat,
    OlderFormat,
    WrongModel,
)

FORMAT = 6
_MOST = 4096  # documents whose writes are remembered


class _Description(msgspec.Struct):
    """What a memory says of itself."""

    format: Positive
    signature: dict[str, Any]
    codec: str
    created: Amount
    quota: Count | None
    selector: bool  # has it one, which then says of itself what it is


class StoredAt(NamedTuple):
    """Where records of a block lie, or would."""

    number: int
    block: int
    stored: bool = True
    digest: Digest = b""  # of a passage


def _check_bound(what: str, size: int | None) -> None:
    """What is no number of bytes would be committed, and not be read any more. Raises InvalidInput;
    what: it bounds.
    """
    try:
        typed(0 if size is None else size, Count)
    except ValueError:
        raise InvalidInput(
            f"a {what} is a whole number of bytes below 2**62, or None for no bound; it is not "
            f"{size!r}"
        ) from None


def _check_budget(budget: int | None, selector: object) -> None:
    """Raises InvalidInput for no bound, and for one of a memory that has no passages."""
    _check_bound("kv budget", budget)
    if budget is not None and selector is None:
        raise InvalidInput(
            "a kv budget is of passages, which a selector chooses, and this memory has none; leave "
            "it out, or set a quota"
        )


class Catalog:
    """The tables of one memory, over its database.

    source: what its blocks are read from where that is not the database (memstore.share); its
    landmark keys are then read when they are first searched. allow_partial: whether answers may
    leave out what cannot be read.
    """

    source: Any = None
    allow_partial = False

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
                f"{database.path} was made by an older version; read the documents in again "
                "(memstore ingest)"
            )
        try:
            known = typed(row, _Description)
            self.signature = Signature.from_dict(known.signature)
            self.blocks = BlockTable(self.signature, known.codec)
            self.passages = PassageTable(self.blocks)
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{database.path}: its own description is damaged ({error}); restore it from a copy"
            ) from error
        self.selector = self.read_selector()
        if (self.selector is not None) != known.selector:
            raise CorruptMemory(
                f"{database.path} lacks what it says of its selector; restore it from a copy"
            )
        # of each document: its row as it was read last, and the writes that it tells of
        self._writes: dict[int, tuple[bytes, tuple[Write, ...]]] = {}
        self.created = known.created
        database.limit = known.quota

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        quota: int | None = None,
        kv_budget: int | None = None,
        selector: SelectorForm | None = None,
    ) -> "Catalog":
        """Make a new memory in `path` (a directory that is absent or empty) and open it for
        writing.

        quota: bytes that the data file may reach; None for no bound. kv_budget: bytes that records
        of passages may take; likewise. selector: what blocks are found by; None for landmark keys
        of the model's own layers. All or nothing: killed at any
        point, the directory holds a whole memory or none, and creating can be tried again.

        Raises MemoryExists, InvalidInput (not an empty directory; a network file system; no quota),
        InvalidConfig (codec), ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        _check_bound("quota", quota)
        _check_budget(kv_budget, selector)
        row = {
            "format": FORMAT,
            "signature": signature.to_dict(),
            "codec": codec_for_new(codec).name,
            "created": time.time(),
            "quota": quota,
            "selector": selector is not None,
        }

        def first(txn: Transaction) -> None:
            txn.put_checked("meta", b"memory", msgpack.packb(row))
            txn.put_checked("meta", b"next_document", msgpack.packb(1))
            if selector is not None:
                SelectorTable(selector).write(txn)
            if kv_budget is not None:
                PassageRecords.begin(txn, kv_budget)

        return cls(Database.create(path, first, limit=quota))

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
        """Close the database; more than once is the same as once."""
        self.database.close()

    @property
    def codec(self) -> str:
        """How blocks are stored from now on."""
        return self.blocks.codec

    @property
    def selector_form(self) -> SelectorForm | None:
        """What its selector keeps; None for a memory without one."""
        return None if self.selector is None else self.selector.form

    @property
    def quota(self) -> int | None:
        """Bytes that the data file may reach; None for no bound."""
        return self.database.limit

    def set_quota(self, quota: int | None) -> None:
        """Change the quota, for good. A file already larger stays as it is and does not grow.

        Raises InvalidInput.
        """
        _check_bound("quota", quota)

        def change(txn: Transaction) -> None:
            row = self._description(txn)
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "quota": quota}))

        self.database.write(change, beyond_limit=True)
        self.database.limit = quota

    @property
    def kv_budget(self) -> int | None:
        """Bytes that records of passages may take; None for no bound. Raises CorruptMemory."""
        with self.database.read() as txn:
            return self.passages.records.kept(txn).budget

    def set_kv_budget(self, budget: int | None, *, wait: bool = False) -> None:
        """Change that, for good; what is beyond it is dropped. wait: for another process that
        writes. Raises InvalidInput, and what Database.write raises.
        """
        _check_budget(budget, self.selector)

        def change(txn: Transaction) -> None:
            self.passages.records.set_budget(txn, budget)

        self.database.write(change, wait=wait, beyond_limit=True)

    def read_selector(self, which: bytes = CURRENT) -> SelectorTable | None:
        """What the memory says of its selector now. Raises CorruptMemory."""
        with self.database.read() as txn:
            return SelectorTable.read(txn, which)

    # Documents

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

    def put_document(self, txn: Transaction, document: Document) -> None:
        """Write a document's row, new or changed."""
        row = asdict(document)
        txn.put_checked("documents", document_key(row.pop("id")), msgpack.packb(row))
        note_change(txn, document.id)

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete a document's blocks, landmark keys, tokens and row, and its references to
        passages; return the bytes of the records that it had.

        Run it by `database.write(work, beyond_limit=True)`: on a full memory even deleting needs a
        little room.
        """
        freed = 0
        with suppress(CorruptMemory):  # references that cannot be told are counted by a repair
            row = self.row(txn, document)
            if row is not None and row.of_passages:
                freed = self._release(txn, row, 0)
        freed += self.blocks.delete(txn, document)
        for table in ("landmarks", "tokens", "documents"):
            txn.delete_range(table, *document_range(document))
        note_change(txn, document)
        return freed

    def truncate_document(
        self, txn: Transaction, document: int, *, blocks: int, tokens: int
    ) -> int:
        """Delete records and landmark keys of the blocks from number `blocks` on and tokens from
        `tokens` on; of a document of passages these, and its tail.

        The row is the caller's to put. Return the bytes of the records that it had of these blocks.
        """
        row = self.row(txn, document)
        if row is not None and row.of_passages:
            freed = self._release(txn, row, blocks)
        else:
            freed = self.blocks.delete(txn, document, first=blocks)
        for which in (CURRENT, NEXT) if self.selector is not None else ():
            table = SelectorTable.read(txn, which)
            if table is not None:
                table.truncate(txn, document, blocks)
        for run in list(self.landmarks(txn, document)):
            if run.end_block > blocks:
                self.delete_landmarks(txn, document, run.layer, run.first_block)
                if run.first_block < blocks:
                    kept = run.keys[: blocks - run.first_block]
                    self.put_landmarks(txn, document, run.layer, run.first_block, kept)
        if row is not None and row.of_passages:
            self._truncate_passages(txn, document, blocks)
        else:
            self._truncate_tokens(txn, document, tokens)
        return freed

    # Tokens

    def put_part(self, txn: Transaction, document: int, number: int, value: bytes) -> None:
        """Write a part of a document's tokens, as encode_tokens or encode_part made it; number: of
        the token, or of the passage, that it begins with.
        """
        txn.put_checked("tokens", tokens_key(document, number), value)

    def put_tokens(
        self,
        txn: Transaction,
        document: int,
        first: int,
        char_start: int,
        ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Write the document's tokens from number `first` on, one part a chunk: see
        encode_tokens.
        """
        self.put_part(txn, document, first, encode_tokens(char_start, ids))

    def parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The parts of a document's tokens from the one on that holds number `first`, to before
        number `end` (None for all), in order: the number that each begins with, and its value.

        The iterator lives in the transaction.
        """
        low, high = document_range(document)
        if end is not None:
            high = tokens_key(document, end)
        start = txn.key_at_or_before("tokens", tokens_key(document, first))
        if start is None or start < low:
            start = low
        for key, value in txn.scan_checked("tokens", start, high):
            yield read_tokens_key(key)[1], value

    def token_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[TokenPart]:
        """The parts that hold tokens `first` to `end` (exclusive; None for all), in order, each
        whole. Raises CorruptMemory.

        The iterator lives in the transaction.
        """
        for number, value in self.parts(txn, document, first, end):
            try:
                part = decode_tokens(number, value)
            except ValueError as error:
                raise CorruptMemory(
                    f"tokens of document {document}: {error}; run verify"
                ) from error
            if number + len(part.ids) > first:
                yield part

    def passage_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[PassagePart]:
        """The parts of a document of passages that hold blocks `first` to `end` (exclusive; None
        for all, and the tail), in order, each whole. Raises CorruptMemory.

        The iterator lives in the transaction.
        """
        for number, value in self.parts(txn, document, first, end):
            try:
                part = decode_part(number, value, self.signature.block_size)
            except ValueError as error:
                raise CorruptMemory(
                    f"passages of document {document}: {error}; run verify"
                ) from error
            if not part.passages or part.end_block > first:
                yield part

    # Passages

    def digests(self, document: Document | None, passages: Iterable[Passage]) -> list[Digest]:
        """By what passages of a document are known; None: of one that comes."""
        signature, codec = self.signature.digest, self.codec if document is None else document.codec
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

    def share(self, digest: Digest, codec: str, k: Any, v: Any) -> None:
        """A passage was computed: nobody else has use of what is in a directory."""

    def _release(self, txn: Transaction, document: Document, first: int) -> int:
        """Give up a document's references from block `first` on; the bytes of their records."""
        freed = 0
        for part in list(self.passage_parts(txn, document.id, first)):
            low = max(0, first - part.first_block)
            for digest in self.digests(document, part.passages[low:]):
                freed += self.passages.release(txn, digest)
        return freed

    def tail(self, txn: Transaction, document: Document) -> str:
        """The text of a document of passages behind its last. Raises CorruptMemory."""
        key = tokens_key(document.id, document.blocks)
        value = txn.get_checked("tokens", key)
        if value is None:
            return ""
        try:
            return decode_part(document.blocks, value, self.signature.block_size).tail
        except ValueError as error:
            raise CorruptMemory(
                f"passages of document {document.name!r}: {error}; run verify"
            ) from error

    def put_tail(self, txn: Transaction, document: Document, start: int, tail: str) -> None:
        """Write that text, which begins at character `start`, in place of another."""
        txn.delete("tokens", tokens_key(document.id, document.blocks))
        if tail:
            self.put_part(txn, document.id, document.blocks, encode_part(start, [], tail))

    def block_lengths(self, txn: Transaction, document: Document) -> np.ndarray:
        """Tokens of each block of a document, int64 [blocks]. Raises CorruptMemory where its
        passages are not all there.
        """
        if not document.of_passages:
            size = self.signature.block_size
            return equal_lengths(document.tokens, size)
        order = PassageOrder()
        try:
            for part in self.passage_parts(txn, document.id):
                order.add(part)
            order.end(document.blocks, document.tokens)
        except ValueError as error:
            raise CorruptMemory(f"document {document.name!r}: {error}; run verify") from error
        return np.array(order.lengths, dtype=np.int64)

    def _truncate_tokens(self, txn: Transaction, document: int, tokens: int) -> None:
        for part in list(self.token_parts(txn, document, first=tokens)):
            txn.delete("tokens", tokens_key(document, part.first))
            if part.first < tokens:
                kept = part.ids[: tokens - part.first]
                self.put_tokens(txn, document, part.first, part.char_start, kept)

    def _truncate_passages(self, txn: Transaction, document: int, blocks: int) -> None:
        for part in list(self.passage_parts(txn, document, first=blocks)):
            txn.delete("tokens", tokens_key(document, part.first_block))
            if part.first_block < blocks:
                kept = encode_part(part.start, part.passages[: blocks - part.first_block])
                self.put_part(txn, document, part.first_block, kept)

    # Landmark keys

    def put_landmarks(
        self, txn: Transaction, document: int, layer: int, first_block: int, keys: np.ndarray
    ) -> None:
        """Write the landmark keys of consecutive blocks, in place of those that begin with the same
        block.

        keys: raw bits [n, num_kv_heads, head_dim].
        """
        value = encode_run(keys, self.signature.geometry)
        txn.put_checked("landmarks", landmarks_key(document, layer, first_block), value)

    def delete_landmarks(
        self, txn: Transaction, document: int, layer: int, first_block: int
    ) -> None:
        """Delete the run of landmark keys that begins with a block, if there is one."""
        txn.delete("landmarks", landmarks_key(document, layer, first_block))

    def bring(self, txn: Transaction, documents: Sequence[int], table: str) -> None:
        """These documents' values of a table are read next. What lies in a file is read when it
        comes to that.
        """

    def landmarks(self, txn: Transaction, document: int | None = None) -> Iterator[LandmarkRun]:
        """Landmark keys of one document, or of all, in order of document, layer and block; copies,
        safe to keep.

        A memory with a selector has none. The iterator lives in the transaction. Raises
        CorruptMemory, also for what is no landmark keys of this memory.
        """
        if self.selector is not None:
            return
        ahead = txn.ahead("landmarks", *document_range(document))
        next(ahead, None)
        for key, value in txn.scan_checked("landmarks", *document_range(document)):
            yield decode_run(key, value, self.signature.geometry)
            next(ahead, None)

    def put_selected(self, txn: Transaction, document: int, run: Run) -> None:
        """Write a run of what the memory's selector finds blocks by. Raises WrongModel where that
        selector was replaced since this was opened.
        """
        self.check_selector(txn)
        assert self.selector is not None
        self.selector.put(txn, document, run)

    def check_selector(self, txn: Transaction) -> None:
        """Raises WrongModel where the memory has another selector by now than when this was
        opened.
        """
        if SelectorTable.read(txn) != self.selector:
            raise WrongModel(
                f"the selector of {self.database.path} was replaced; open the memory anew"
            )

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

    def _document(self, number: int, value: bytes) -> Document:
        try:
            return Document.unpack(number, value)
        except ValueError as error:
            raise CorruptMemory(
                f"{self.database.path}: the row of document {number} is damaged ({error}); run "
                "verify --repair"
            ) from error


def _no_passage(document: Document, block: int) -> str:
    return f"passage {block} of document {document.name!r} is not stored; run verify --repair"
