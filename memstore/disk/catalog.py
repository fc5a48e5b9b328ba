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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np

from memstore.disk.blocks import BlockTable
from memstore.disk.codec import get_codec
from memstore.disk.database import Database, Transaction
from memstore.disk.keys import (
    document_key,
    document_range,
    landmarks_key,
    read_document_key,
    read_landmarks_key,
    read_tokens_key,
    tokens_key,
)
from memstore.disk.signature import Signature
from memstore.errors import CorruptMemory, DocumentNotFound, NewerFormat

FORMAT = 1
# "importing": an import that has not ended, removed by the next one; "replacing": read in part, to
# take the place of the ready document of its name
State = Literal["ingesting", "ready", "importing", "replacing"]
WriteId = bytes  # 16, random
_IMPORTING, _REPLACING = "\0import", "\0replace\0"  # names that said so in format 1


@dataclass(frozen=True)
class IngestSettings:
    """How a document is read; a resumed ingest, and an append, must use the same."""

    chunk_blocks: int
    top_k: int
    cmt_cutoff: float = 0.0
    retrieve: bool = False  # attend to retrieved blocks, and not to the latest ones alone
    granularity: str | None = None  # of retrieving, as the next two
    score_range: float | None = None
    recency: float = 0.0


class Write(NamedTuple):
    """One of the writes that a document was made by: its first, and each append."""

    first: int  # block
    id: WriteId


@dataclass(frozen=True)
class Document:
    """One document's row. `tokens`, `blocks` and `bytes` count what is committed.

    A document that is "importing" or "replacing" has the name that it will be found by once it is
    ready.
    """

    id: int  # 1, 2, ...; never reused
    name: str
    state: State
    tokens: int = 0  # content tokens
    blocks: int = 0
    bytes: int = 0  # record bytes
    source_hash: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0  # seconds since 1970
    settings: IngestSettings = IngestSettings(chunk_blocks=1, top_k=0)
    appended_to: int = 0  # tokens that it had before it was last appended to
    layers: tuple[int, ...] | None = None  # that are stored; None for all of the signature
    # in order of blocks; empty for a document of format 1, which has those since then
    writes: tuple[Write, ...] = ()

    def write_of(self, block: int) -> WriteId | None:
        """The id of the write that made a block's records; None for records of format 1."""
        return next((write.id for write in reversed(self.writes) if write.first <= block), None)


class TokenPart(NamedTuple):
    """A run of a document's tokens as it was committed."""

    first: int  # number of the part's first token in the document
    char_start: int  # characters of the document before that token
    ids: np.ndarray  # int64 [n]


class LandmarkRun(NamedTuple):
    """Landmark keys of consecutive blocks of one document and layer."""

    document: int
    layer: int
    first_block: int
    keys: np.ndarray  # raw bits [n, num_kv_heads, head_dim]


class Catalog:
    """The tables of one memory, over its database."""

    def __init__(self, database: Database) -> None:
        """Read the memory's own row. Raises NewerFormat, CorruptMemory."""
        self.database = database
        with database.read() as txn:
            row = self._unpack(txn.get_checked("meta", b"memory"), "its own description")
        if row.get("format", 0) > FORMAT:
            raise NewerFormat(
                f"{database.path} is in format {row['format']}, this version reads up to {FORMAT}; "
                "update memstore"
            )
        self.signature = Signature.from_dict(row["signature"])
        self.blocks = BlockTable(self.signature.geometry, row["codec"])
        self.created: float = row["created"]
        database.limit = row["quota"]

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        quota: int | None = None,
    ) -> "Catalog":
        """Make a new memory in `path` (a directory that is absent or empty) and open it for
        writing.

        quota: bytes that the data file may reach; None for no bound. All or nothing: killed at any
        point, the directory holds a whole memory or none, and creating can be tried again.

        Raises MemoryExists, InvalidInput (not an empty directory; a network file system),
        InvalidConfig (codec), ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        row = {
            "format": FORMAT,
            "signature": signature.to_dict(),
            "codec": get_codec(codec).name,
            "created": time.time(),
            "quota": quota,
        }

        def first(txn: Transaction) -> None:
            txn.put_checked("meta", b"memory", msgpack.packb(row))
            txn.put_checked("meta", b"next_document", msgpack.packb(1))

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
    def quota(self) -> int | None:
        """Bytes that the data file may reach; None for no bound."""
        return self.database.limit

    def set_quota(self, quota: int | None) -> None:
        """Change the quota, for good. A file already larger stays as it is and does not grow."""

        def change(txn: Transaction) -> None:
            row = self._unpack(txn.get_checked("meta", b"memory"), "its own description")
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "quota": quota}))

        self.database.write(change, beyond_limit=True)
        self.database.limit = quota

    # Documents

    def new_document_id(self, txn: Transaction) -> int:
        """The next document id, never given out before (unless the transaction is not
        committed).
        """
        number: int = self._unpack(
            txn.get_checked("meta", b"next_document"), "its count of documents"
        )
        txn.put_checked("meta", b"next_document", msgpack.packb(number + 1))
        return number

    def documents(self, txn: Transaction) -> list[Document]:
        """Every document's row, whatever its state, in order of id."""
        return [
            self._document(read_document_key(key), value)
            for key, value in txn.scan_checked("documents", *document_range())
        ]

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

    def put_document(self, txn: Transaction, document: Document) -> None:
        """Write a document's row, new or changed."""
        row = asdict(document)
        txn.put_checked("documents", document_key(row.pop("id")), msgpack.packb(row))

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete a document's blocks, landmark keys, tokens and row; return the record bytes that
        were freed.

        Run it by `database.write(work, beyond_limit=True)`: on a full memory even deleting needs a
        little room.
        """
        freed = self.blocks.delete(txn, document)
        for table in ("landmarks", "tokens", "documents"):
            txn.delete_range(table, *document_range(document))
        return freed

    def truncate_document(
        self, txn: Transaction, document: int, *, blocks: int, tokens: int
    ) -> int:
        """Delete records and landmark keys of the blocks from number `blocks` on and tokens from
        `tokens` on.

        The row is the caller's to put. Return the record bytes that were freed.
        """
        freed = self.blocks.delete(txn, document, first=blocks)
        for run in list(self.landmarks(txn, document)):
            if run.first_block + len(run.keys) > blocks:
                txn.delete("landmarks", landmarks_key(document, run.layer, run.first_block))
                if run.first_block < blocks:
                    kept = run.keys[: blocks - run.first_block]
                    self.put_landmarks(txn, document, run.layer, run.first_block, kept)
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
        self, txn: Transaction, document: int, layer: int, first_block: int, keys: np.ndarray
    ) -> None:
        """Write the landmark keys of consecutive blocks; keys: raw bits [n, num_kv_heads,
        head_dim].
        """
        txn.put_checked("landmarks", landmarks_key(document, layer, first_block), keys.tobytes())

    def landmarks(self, txn: Transaction, document: int | None = None) -> Iterator[LandmarkRun]:
        """Landmark keys of one document, or of all, in order of document, layer and block; copies,
        safe to keep.

        The iterator lives in the transaction. Raises CorruptMemory.
        """
        geometry = self.signature.geometry
        heads, dim, itemsize = geometry.num_kv_heads, geometry.head_dim, geometry.itemsize
        ahead = txn.ahead("landmarks", *document_range(document))
        next(ahead, None)
        for key, value in txn.scan_checked("landmarks", *document_range(document)):
            owner, layer, first_block = read_landmarks_key(key)
            if not value or len(value) % (heads * dim * itemsize):
                raise CorruptMemory(
                    f"landmark keys of document {owner}, layer {layer}, block {first_block} in "
                    f"{self.database.path} "
                    "have an impossible length; run verify"
                )
            keys = np.frombuffer(value, f"<i{itemsize}").reshape(-1, heads, dim)
            yield LandmarkRun(owner, layer, first_block, keys)
            next(ahead, None)

    def _unpack(self, value: bytes | None, what: str) -> Any:
        if value is None:
            raise CorruptMemory(f"{self.database.path} lacks {what}; restore it from a copy")
        return msgpack.unpackb(value)

    def _document(self, number: int, value: bytes) -> Document:
        return document_from_row({**msgpack.unpackb(value), "id": number})


def document_from_row(row: dict[str, Any]) -> Document:
    """The document whose fields a row has, as `asdict` or format 1 wrote them. Raises TypeError,
    KeyError.
    """
    settings, name = dict(row["settings"]), row["name"]
    row = {"appended_to": settings.pop("appended_to", 0), **row}
    row["settings"] = IngestSettings(**settings)
    if name == _IMPORTING:
        row["state"] = "importing"
    elif name.startswith(_REPLACING):
        row |= {"name": name.removeprefix(_REPLACING), "state": "replacing"}
    if row.get("layers") is not None:
        row["layers"] = tuple(row["layers"])
    row["writes"] = tuple(Write(*write) for write in row.get("writes", ()))
    return Document(**row)
