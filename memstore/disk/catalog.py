"""The tables beside the blocks: the memory's signature, its documents and their states, tokens, and
landmark keys.

Every method takes the transaction it works in, so that what belongs together is committed together:

    def commit(txn: Transaction) -> None:              # may be run again after the map has grown:
    see Database.write
        for layer, (k, v) in enumerate(chunk):
            size += disk.write(txn, document.id, block, layer, k, v, length)
        catalog.put_tokens(txn, document.id, first_token, char_start, ids)
        catalog.put_landmarks(txn, document.id, layer, first_block, keys)
        catalog.put_document(txn, replace(document, tokens=..., blocks=..., bytes=...))

    catalog.database.write(commit)

    with catalog.database.read() as txn:
        documents = catalog.documents(txn)
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgpack
import numpy as np
from torch import Tensor

from memstore.disk.codec import get_codec
from memstore.disk.database import Database, Transaction
from memstore.disk.keys import (
    block_range,
    document_key,
    document_range,
    landmarks_key,
    read_document_key,
    read_landmarks_key,
    read_tokens_key,
    tokens_key,
)
from memstore.disk.record import DTYPES, from_raw, raw_view
from memstore.errors import CorruptMemory, DocumentNotFound, InvalidConfig, NewerFormat

FORMAT = 1
State = Literal["ingesting", "ready"]


@dataclass(frozen=True)
class Signature:
    """What must be equal for one model's memory to be another's: weights, tokenizer, architecture,
    KV geometry.
    """

    weights: str  # hex digest of the weights
    tokenizer: str  # hex digest of the tokenizer
    # what shapes keys and values: layers, RoPE, norms, block size; plain JSON values
    architecture: dict[str, Any]
    kv_dtype: str  # "float32" | "float16" | "bfloat16"
    num_layers: int
    memory_layers: tuple[int, ...]  # layers whose landmarks are indexed
    num_kv_heads: int
    head_dim: int
    block_size: int  # content tokens of a block

    def __post_init__(self) -> None:
        if self.kv_dtype not in DTYPES:
            raise InvalidConfig(
                f"KV dtype {self.kv_dtype!r} is not stored; choose one of {', '.join(DTYPES)}"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """The signature as plain values."""
        return {**asdict(self), "memory_layers": list(self.memory_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The signature that `to_dict` was taken of."""
        return cls(**{**values, "memory_layers": tuple(values["memory_layers"])})

    def difference(self, other: "Signature") -> list[str]:
        """What differs, in words, one entry a field; empty when a memory of the one serves the
        other.
        """
        words = []
        for name in (f.name for f in fields(self) if f.name != "architecture"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                if name in ("weights", "tokenizer"):
                    mine, others = mine[:12], others[:12]
                words.append(f"{name} {mine} instead of {others}")
        for name in sorted(self.architecture.keys() | other.architecture.keys()):
            mine, others = self.architecture.get(name), other.architecture.get(name)
            if mine != others:
                words.append(f"{name} {mine} instead of {others}")
        return words


@dataclass(frozen=True)
class Document:
    """One document's row. `tokens`, `blocks` and `bytes` count what is committed."""

    id: int  # 1, 2, ...; never reused
    name: str
    state: State
    tokens: int = 0  # content tokens
    blocks: int = 0
    bytes: int = 0  # record bytes
    source_hash: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0  # seconds since 1970
    # of the ingest; a resumed one must use the same
    settings: dict[str, Any] = field(default_factory=dict)


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
    keys: Tensor  # [n, num_kv_heads, head_dim] in the KV dtype


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
        self.codec: str = row["codec"]
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
        """One document by name or id. Raises DocumentNotFound, which lists the names there are."""
        if isinstance(which, int):
            value = txn.get_checked("documents", document_key(which)) if which > 0 else None
            if value is not None:
                return self._document(which, value)
        documents = self.documents(txn)
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
        freed = txn.delete_range("blocks", *block_range(document))[1]
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
        freed = txn.delete_range("blocks", *block_range(document, first=blocks))[1]
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
        self, txn: Transaction, document: int, layer: int, first_block: int, keys: Tensor
    ) -> None:
        """Write the landmark keys of consecutive blocks; keys: [n, num_kv_heads, head_dim] in the
        KV dtype.
        """
        txn.put_checked(
            "landmarks", landmarks_key(document, layer, first_block), raw_view(keys).tobytes()
        )

    def landmarks(self, txn: Transaction, document: int | None = None) -> Iterator[LandmarkRun]:
        """Landmark keys of one document, or of all, in order of document, layer and block; copies,
        safe to keep.

        The iterator lives in the transaction. Raises CorruptMemory.
        """
        geometry = (self.signature.num_kv_heads, self.signature.head_dim)
        size = DTYPES[self.signature.kv_dtype].itemsize * geometry[0] * geometry[1]
        ahead = txn.ahead("landmarks", *document_range(document))
        next(ahead, None)
        for key, value in txn.scan_checked("landmarks", *document_range(document)):
            owner, layer, first_block = read_landmarks_key(key)
            if not value or len(value) % size:
                raise CorruptMemory(
                    f"landmark keys of document {owner}, layer {layer}, block {first_block} in "
                    f"{self.database.path} "
                    "have an impossible length; run verify"
                )
            keys = from_raw(value, (-1, *geometry), self.signature.kv_dtype)
            yield LandmarkRun(owner, layer, first_block, keys)
            next(ahead, None)

    def _unpack(self, value: bytes | None, what: str) -> Any:
        if value is None:
            raise CorruptMemory(f"{self.database.path} lacks {what}; restore it from a copy")
        return msgpack.unpackb(value)

    def _document(self, number: int, value: bytes) -> Document:
        return Document(id=number, **msgpack.unpackb(value))
