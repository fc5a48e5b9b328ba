"""The tables beside the blocks: the memory's signature, its documents and their states, tokens, and
landmark keys.

Every method takes the transaction it works in, so that what belongs together is committed together:

    def commit(txn: Transaction) -> None:  # may be run again: see Database.write
        for layer, (k, v) in enumerate(chunk):
            for at, record in enumerate(catalog.blocks.encode(key, k, v, lengths, write)):
                size += catalog.blocks.put(txn, key._replace(block=key.block + at), record)
        catalog.put_tokens(txn, document.id, first_token, char_start, ids)
        catalog.runs.put(txn, document.id, layer, KeyRun(first_block, keys))
        catalog.put_document(txn, replace(document, tokens=..., blocks=..., bytes=...))

    catalog.database.write(commit)
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from memstore.decode import typed
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.keys import document_range
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.changes import note_change
from memstore.disk.tables.description import FORMAT, Description, check_quota
from memstore.disk.tables.document_passages import DocumentPassages
from memstore.disk.tables.passage_table import Digest, PassageTable
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory, InvalidConfig, NewerFormat, OlderFormat


class Catalog(DocumentPassages):
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
            known = typed(row, Description)
            self.signature = Signature.from_dict(known.signature)
            self.blocks = BlockTable(self.signature, known.codec)
            self.passages = PassageTable(self.blocks)
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{database.path}: its own description is damaged ({error}); restore it from a copy"
            ) from error
        with database.read() as txn:
            selector = RunTable.read(txn, self.signature.geometry)
        self.runs = RunTable(self.signature.geometry) if selector is None else selector
        if (selector is not None) != known.selector:
            raise CorruptMemory(
                f"{database.path} lacks the row of its selector; restore it from a copy"
            )
        self._writes = {}
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
        selector: IndexSpec | None = None,
    ) -> "Catalog":
        """Make a new memory in `path` (a directory that is absent or empty) and open it for
        writing.

        quota: bytes that the data file may reach; None for no bound. selector: what blocks
        are found by; None for landmark keys of the model's own layers. All or nothing: killed at
        any point, the directory holds a whole memory or none, and creating can be tried again.

        Raises MemoryExists, InvalidInput (not an empty directory; a network file system; no quota),
        InvalidConfig (codec), ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        check_quota(quota)
        row = {
            "format": FORMAT,
            "signature": signature.to_dict(),
            "codec": get_codec(codec).name,
            "created": time.time(),
            "quota": quota,
            "selector": selector is not None,
        }

        def first(txn: Transaction) -> None:
            txn.put_checked("meta", b"memory", msgpack.packb(row))
            txn.put_checked("meta", b"next_document", msgpack.packb(1))
            if selector is not None:
                RunTable(signature.geometry, selector).write(txn)

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
    def manifest(self) -> int | None:
        """The number of the manifest that a published memory is read by; None for a directory."""
        return None

    def leaving(self, txn: Transaction) -> Mapping[int, Document]:
        """Documents that are there no more, and stay a while for who has begun to read them; none
        in a directory.
        """
        return {}

    @property
    def codec(self) -> str:
        """How blocks are stored from now on."""
        return self.blocks.codec

    @property
    def selector(self) -> RunTable | None:
        """The runs of its selector; None for a memory without one."""
        return None if self.runs.spec is None else self.runs

    @property
    def index_spec(self) -> IndexSpec | None:
        """What its selector keeps; None for a memory without one."""
        return self.runs.spec

    @property
    def quota(self) -> int | None:
        """Bytes that the data file may reach; None for no bound."""
        return self.database.limit

    def set_quota(self, quota: int | None) -> None:
        """Change the quota, for good. A file already larger stays as it is and does not grow.

        Raises InvalidInput.
        """
        check_quota(quota)

        def change(txn: Transaction) -> None:
            row = self._description(txn)
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "quota": quota}))

        self.database.write(change, beyond_limit=True)
        self.database.limit = quota

    # Documents

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
                freed = self.release(txn, row, 0)
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
            freed = self.release(txn, row, blocks)
        else:
            freed = self.blocks.delete(txn, document, first=blocks)
        self.runs.truncate(txn, document, blocks)
        if row is not None and row.of_passages:
            self.truncate_passages(txn, document, blocks)
        else:
            self.truncate_tokens(txn, document, tokens)
        return freed

    def share(self, digest: Digest, codec: str, k: Any, v: Any) -> None:
        """A passage was computed: nobody else has use of what is in a directory."""

    def bring(self, txn: Transaction, documents: Sequence[int], table: str) -> None:
        """These documents' values of a table are read next. What lies in a file is read when it
        comes to that.
        """

    def _description(self, txn: Transaction) -> dict[str, Any]:
        value = txn.get_checked("meta", b"memory")
        return self._unpack(value, dict[str, Any], "its own description")
