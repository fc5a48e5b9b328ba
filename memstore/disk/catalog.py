"""The tables beside the blocks: the memory's signature, its documents and their states, tokens, and
landmark keys.

Every method takes the transaction it works in, so that what belongs together is committed together:

    def commit(txn: Transaction) -> None:              # may be run again after the map has grown:
    see Database.write
        for layer, (k, v) in enumerate(chunk):
            for at, record in enumerate(catalog.blocks.encode(key, k, v, length, write)):
                size += catalog.blocks.put(txn, key._replace(block=key.block + at), record)
        catalog.put_tokens(txn, document.id, first_token, char_start, ids)
        catalog.put_landmarks(txn, document.id, layer, first_block, keys)
        catalog.put_document(txn, replace(document, tokens=..., blocks=..., bytes=...))

    catalog.database.write(commit)

    with catalog.database.read() as txn:
        documents = catalog.documents(txn)
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from memstore.block import RecordKey
from memstore.decode import Amount, Count, Positive, T, typed, unpack
from memstore.disk.blocks import BlockTable
from memstore.disk.changes import Changes, note_change, read_changes
from memstore.disk.codec import codec_for_new
from memstore.disk.database import Database, Transaction
from memstore.disk.document import Document, Write
from memstore.disk.keys import (
    document_key,
    document_range,
    landmarks_key,
    landmarks_key1,
    read_document_key,
    read_tokens_key,
    tokens_key,
)
from memstore.disk.landmarks import LandmarkRun, decode_run, encode_run
from memstore.disk.record import WriteId
from memstore.disk.selector_form import SelectorForm
from memstore.disk.selector_runs import Run
from memstore.disk.selector_table import CURRENT, NEXT, SelectorTable
from memstore.disk.signature import Signature
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    InvalidConfig,
    InvalidInput,
    NewerFormat,
    WrongModel,
)

FORMAT = 2
SELECTOR_FORMAT = 3  # of memories with a selector, which older versions would take for damaged
_MOST = 4096  # documents whose writes are remembered


class _Description(msgspec.Struct):
    """What a memory says of itself."""

    format: Positive
    signature: dict[str, Any]
    codec: str
    created: Amount
    quota: Count | None


def _check_quota(quota: int | None) -> None:
    """What is no quota would be committed, and the memory not be opened any more. Raises
    InvalidInput.
    """
    try:
        typed(0 if quota is None else quota, Count)
    except ValueError:
        raise InvalidInput(
            "a quota is a whole number of bytes below 2**62, or None for no bound; it is not "
            f"{quota!r}"
        ) from None


class TokenPart(NamedTuple):
    """A run of a document's tokens as it was committed."""

    first: int  # number of the part's first token in the document
    char_start: int  # characters of the document before that token
    ids: np.ndarray  # int64 [n]


class Prefix(NamedTuple):
    """The keys and values of a fixed beginning that every reading may start from."""

    ids: np.ndarray  # int64 [n]
    write: WriteId  # the id of the write that made its records
    # of each layer that is stored: raw bits of K and V [blocks, num_kv_heads, block_size, head_dim]
    layers: dict[int, tuple[np.ndarray, np.ndarray]]


class Catalog:
    """The tables of one memory, over its database.

    source: what its blocks are read from where that is not the database (memstore.share); its
    landmark keys are then read when they are first searched. allow_partial: whether answers may
    leave out what cannot be read.
    """

    source: Any = None
    allow_partial = False

    def __init__(self, database: Database) -> None:
        """Read the memory's own row. Raises NewerFormat, CorruptMemory."""
        self.database = database
        with database.read() as txn:
            row = self._description(txn)
        if isinstance(row.get("format"), int) and row["format"] > SELECTOR_FORMAT:
            raise NewerFormat(
                f"{database.path} is in format {row['format']}, this version reads up to "
                f"{SELECTOR_FORMAT}; update memstore"
            )
        try:
            known = typed(row, _Description)
            self.signature = Signature.from_dict(known.signature)
            self.blocks = BlockTable(self.signature, known.codec)
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{database.path}: its own description is damaged ({error}); restore it from a copy"
            ) from error
        self.selector = self.read_selector()
        if (self.selector is not None) != (known.format == SELECTOR_FORMAT):
            raise CorruptMemory(
                f"{database.path} lacks what it says of its selector; restore it from a copy"
            )
        # of each document: its row as it was read last, and the writes that it tells of
        self._writes: dict[int, tuple[bytes, tuple[Write, ...]]] = {}
        if known.format < FORMAT:
            database.before_write = self._raise_format
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
        selector: SelectorForm | None = None,
    ) -> "Catalog":
        """Make a new memory in `path` (a directory that is absent or empty) and open it for
        writing.

        quota: bytes that the data file may reach; None for no bound. selector: what blocks are
        found by; None for landmark keys of the model's own layers. All or nothing: killed at any
        point, the directory holds a whole memory or none, and creating can be tried again.

        Raises MemoryExists, InvalidInput (not an empty directory; a network file system; no quota),
        InvalidConfig (codec), ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        _check_quota(quota)
        row = {
            "format": FORMAT if selector is None else SELECTOR_FORMAT,
            "signature": signature.to_dict(),
            "codec": codec_for_new(codec).name,
            "created": time.time(),
            "quota": quota,
        }

        def first(txn: Transaction) -> None:
            txn.put_checked("meta", b"memory", msgpack.packb(row))
            txn.put_checked("meta", b"next_document", msgpack.packb(1))
            if selector is not None:
                SelectorTable(selector, signature.block_size).write(txn)

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
        _check_quota(quota)

        def change(txn: Transaction) -> None:
            row = self._description(txn)
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "quota": quota}))

        self.database.write(change, beyond_limit=True)
        self.database.limit = quota

    def read_selector(self, which: bytes = CURRENT) -> SelectorTable | None:
        """What the memory says of its selector now. Raises CorruptMemory."""
        with self.database.read() as txn:
            return SelectorTable.read(txn, self.signature.block_size, which)

    # Documents

    def _raise_format(self, txn: Transaction) -> None:
        """What is written in this transaction is of a format that older versions cannot read."""
        row = self._description(txn)
        if row["format"] < FORMAT:
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "format": FORMAT}))

    def new_document_id(self, txn: Transaction) -> int:
        """The next document id, never given out before (unless the transaction is not
        committed).
        """
        number = self.next_document_id(txn)
        txn.put_checked("meta", b"next_document", msgpack.packb(number + 1))
        return number

    def next_document_id(self, txn: Transaction) -> int:
        """The id that the next document gets. Raises CorruptMemory."""
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
        """A document's row by id (of the prefix: 0), or None."""
        value = txn.get_checked("documents", document_key(document))
        return None if value is None else self._document(document, value)

    def writes(self, txn: Transaction, document: int) -> tuple[Write, ...]:
        """The writes that a document (or the prefix, as document 0) was made by. Raises
        DocumentNotFound.

        Told anew only when the row is another: readers ask at every batch.
        """
        value = txn.get("documents", document_key(document)) if document >= 0 else None
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
        if document.id:  # the prefix is in no listing
            note_change(txn, document.id)

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete a document's blocks, landmark keys, tokens and row; return the record bytes that
        were freed.

        Run it by `database.write(work, beyond_limit=True)`: on a full memory even deleting needs a
        little room.
        """
        freed = self.blocks.delete(txn, document)
        for table in ("landmarks", "tokens", "documents"):
            txn.delete_range(table, *document_range(document))
        if document:
            note_change(txn, document)
        return freed

    def truncate_document(
        self, txn: Transaction, document: int, *, blocks: int, tokens: int
    ) -> int:
        """Delete records and landmark keys of the blocks from number `blocks` on and tokens from
        `tokens` on.

        The row is the caller's to put. Return the record bytes that were freed.
        """
        freed = self.blocks.delete(txn, document, first=blocks)
        for which in (CURRENT, NEXT) if self.selector is not None else ():
            table = SelectorTable.read(txn, self.signature.block_size, which)
            if table is not None:
                table.truncate(txn, document, blocks)
        for run in list(self.landmarks(txn, document)):
            if run.first_block + run.blocks > blocks:
                self.delete_landmarks(txn, document, run.layer, run.first_block)
                if run.first_block < blocks:
                    kept = run.keys[: (blocks - run.first_block) * run.per_block]
                    self.put_landmarks(
                        txn, document, run.layer, run.first_block, kept, run.per_block
                    )
        for part in list(self.token_parts(txn, document, first=tokens)):
            txn.delete("tokens", tokens_key(document, part.first))
            if part.first < tokens:
                self.put_tokens(
                    txn, document, part.first, part.char_start, part.ids[: tokens - part.first]
                )
        return freed

    # Tokens

    def put_tokens(
        self,
        txn: Transaction,
        document: int,
        first: int,
        char_start: int,
        ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Write the document's tokens from number `first` on, one part a chunk.

        char_start: characters of the document before the part's first token. ids: content tokens
        (no landmarks), each below 2**32.
        """
        value = char_start.to_bytes(8, "little") + np.asarray(ids, dtype="<u4").tobytes()
        txn.put_checked("tokens", tokens_key(document, first), value)

    def token_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[TokenPart]:
        """The parts that hold tokens `first` to `end` (exclusive; None for all), in order, each
        whole.

        The iterator lives in the transaction.
        """
        low, high = document_range(document)
        if end is not None:
            high = tokens_key(document, end)
        start = txn.key_at_or_before("tokens", tokens_key(document, first))
        if start is None or start < low:
            start = low
        for key, value in txn.scan_checked("tokens", start, high):
            part_first = read_tokens_key(key)[1]
            if len(value) < 12 or len(value) % 4:
                raise CorruptMemory(
                    f"tokens of document {document} have an impossible length; run verify"
                )
            ids = np.frombuffer(value, dtype="<u4", offset=8).astype(np.int64)
            if part_first + len(ids) > first:
                yield TokenPart(part_first, int.from_bytes(value[:8], "little"), ids)

    def tokens(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Content token ids `first` to `end` (exclusive; None for all), int64; fewer where the
        document ends.
        """
        pieces = [
            part.ids[max(0, first - part.first) : None if end is None else end - part.first]
            for part in self.token_parts(txn, document, first, end)
        ]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    # Landmark keys

    def put_landmarks(
        self,
        txn: Transaction,
        document: int,
        layer: int,
        first_block: int,
        keys: np.ndarray,
        per_block: int = 1,
    ) -> None:
        """Write the landmark keys of consecutive blocks, in place of those that begin with the same
        block.

        keys: raw bits [n * per_block, num_kv_heads, head_dim], those of a block together.
        """
        value = encode_run(keys, per_block, self.signature.geometry)
        txn.delete("landmarks", landmarks_key1(document, layer, first_block))
        txn.put_checked("landmarks", landmarks_key(document, layer, first_block), value)

    def delete_landmarks(
        self, txn: Transaction, document: int, layer: int, first_block: int
    ) -> None:
        """Delete the run of landmark keys that begins with a block, if there is one."""
        for key in (landmarks_key, landmarks_key1):
            txn.delete("landmarks", key(document, layer, first_block))

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
        if SelectorTable.read(txn, self.signature.block_size) != self.selector:
            raise WrongModel(
                f"the selector of {self.database.path} was replaced; open the memory anew"
            )

    # The prefix: kept as document 0, which no listing shows

    def put_prefix(
        self,
        txn: Transaction,
        ids: Sequence[int] | np.ndarray,
        layers: Mapping[int, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Keep the keys and values of a fixed beginning, in place of another.

        ids: its content tokens; layers: of each layer that is kept, raw bits of K and V [blocks,
        num_kv_heads, block_size, head_dim], K rotated by the offset inside the block only.
        """
        self.delete_document(txn, 0)
        blocks = -(-len(ids) // self.signature.block_size)
        last_length = len(ids) - (blocks - 1) * self.signature.block_size
        row = Document(0, "", "ready", len(ids), blocks, layers=tuple(layers)).begin_write(0)
        size = 0
        for layer, (k, v) in layers.items():
            key = RecordKey(0, 0, layer)
            records = self.blocks.encode(key, k, v, last_length, row.writes[0].id)
            for block, record in enumerate(records):
                size += self.blocks.put(txn, RecordKey(0, block, layer), record)
        self.put_tokens(txn, 0, 0, 0, ids)
        self.put_document(txn, replace(row, bytes=size))

    def prefix(self, txn: Transaction) -> Prefix | None:
        """The prefix, if there is one. Raises CorruptMemory."""
        row = self.row(txn, 0)
        if row is None:
            return None
        layers = {}
        for layer in row.layers_of(self.signature):
            stored = [
                self.blocks.get(txn, RecordKey(0, block, layer), row.write_of(block))
                for block in range(row.blocks)
            ]
            layers[layer] = (
                np.stack([k for k, _, _ in stored]),
                np.stack([v for _, v, _ in stored]),
            )
        return Prefix(self.tokens(txn, 0), row.writes[0].id, layers)

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
