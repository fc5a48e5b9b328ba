"""Passages by their content: each is stored once, under a number, whatever documents hold it, and
its references are counted.

A passage is known by its digest, of all that its keys and values follow from: the memory's
signature, the codec of its record and its tokens, those of the context in front included. Table
`digests` has the number of each digest; table `passages` has of each number the digest, the
references, the bytes of its record (0: none is stored), and the document and block that referred to
it last. A record follows from the tokens, so it may be missing.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgpack
import numpy as np
from msgspec import Meta

from memstore.block import RecordKey
from memstore.decode import Block, Count, unpack
from memstore.disk.format.keys import number_key, read_number_key
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptMemory

DIGEST_BYTES = 16
Digest = bytes


def digest_of(signature: bytes, codec: str, ids: np.ndarray) -> Digest:
    """The digest of a passage of these tokens; signature: Signature.digest."""
    content = b"".join((signature, codec.encode(), b"\0", np.asarray(ids).astype("<u4").tobytes()))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class StoredPassage(NamedTuple):
    """The row of a passage."""

    number: int
    digest: Digest
    references: int = 0  # of documents' lists; one that holds it twice counts twice
    bytes: int = 0  # of its record; 0: none is stored
    home: tuple[int, int] = (0, 0)  # document and block that referred to it last


class PassageCounts(NamedTuple):
    """How many passages there are, how many records are stored, and the bytes of these."""

    passages: int = 0
    stored: int = 0
    bytes: int = 0


class _Row(NamedTuple):
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    references: Count
    bytes: Count
    document: Count
    block: Block


class PassageTable:
    """The passages of one memory. Every method takes the transaction it works in."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    # Rows

    def number(self, txn: Transaction, digest: Digest) -> int | None:
        """The number of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("digests", digest)
        if value is None:
            return None
        try:
            return unpack(value, Count)
        except ValueError as error:
            raise _damaged(digest.hex(), error) from error

    def row(self, txn: Transaction, number: int) -> StoredPassage | None:
        """The row of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("passages", number_key(number))
        return None if value is None else _decode(number, value)

    def find(self, txn: Transaction, digest: Digest) -> StoredPassage | None:
        """The row of the passage of a digest, or None. Raises CorruptMemory."""
        number = self.number(txn, digest)
        if number is None:
            return None
        row = self.row(txn, number)
        if row is None or row.digest != digest:
            raise _damaged(digest.hex(), ValueError(f"number {number} is another's"))
        return row

    def all(self, txn: Transaction) -> Iterator[StoredPassage]:
        """Every passage, in order of number. Raises CorruptMemory."""
        for key, value in txn.scan_checked("passages"):
            yield _decode(read_number_key(key), value)

    def counts(self, txn: Transaction) -> PassageCounts:
        """All passages, counted. Raises CorruptMemory."""
        passages = stored = size = 0
        for row in self.all(txn):
            passages, stored, size = passages + 1, stored + (row.bytes > 0), size + row.bytes
        return PassageCounts(passages, stored, size)

    def correct(self, txn: Transaction, row: StoredPassage, references: int) -> None:
        """Set the references to a passage, and have it found by its digest."""
        self._put(txn, row._replace(references=references))
        txn.put_checked("digests", row.digest, msgpack.packb(row.number))

    def _put(self, txn: Transaction, row: StoredPassage) -> None:
        value = msgpack.packb([row.digest, row.references, row.bytes, *row.home])
        txn.put_checked("passages", number_key(row.number), value)

    # References

    def refer(
        self,
        txn: Transaction,
        document: int,
        first_block: int,
        digests: Sequence[Digest],
        new_number: Callable[[Transaction], int],
    ) -> list[StoredPassage]:
        """Count a document's references from its blocks `first_block` on; new_number: for passages
        that are new. Raises CorruptMemory.
        """
        rows = []
        for block, digest in enumerate(digests, first_block):
            row = self.find(txn, digest)
            if row is None:
                row = StoredPassage(new_number(txn), digest)
                txn.put_checked("digests", digest, msgpack.packb(row.number))
            rows.append(row._replace(references=row.references + 1, home=(document, block)))
            self._put(txn, rows[-1])
        return rows

    def release(self, txn: Transaction, digest: Digest) -> None:
        """Count a reference less; the passage goes with the last one. Raises CorruptMemory."""
        row = self.find(txn, digest)
        if row is None:
            return
        if row.references > 1:
            self._put(txn, row._replace(references=row.references - 1))
            return
        self._blocks.delete(txn, row.number)
        txn.delete("passages", number_key(row.number))
        txn.delete("digests", row.digest)

    # Records

    def store(self, txn: Transaction, row: StoredPassage, record: bytes) -> None:
        """Store the record of a passage that has none."""
        self._blocks.put(txn, RecordKey(row.number, 0, 0), record)
        self._put(txn, row._replace(bytes=len(record)))

    def drop_record(self, txn: Transaction, number: int) -> bool:
        """Delete the record of a passage, which stays by its tokens; return whether there is such a
        passage. Raises CorruptMemory.
        """
        row = self.row(txn, number)
        if row is not None:
            self._blocks.delete(txn, number)
            self._put(txn, row._replace(bytes=0))
        return row is not None


def _decode(number: int, value: bytes) -> StoredPassage:
    try:
        row = unpack(value, _Row)
    except ValueError as error:
        raise _damaged(str(number), error) from error
    return StoredPassage(number, *row[:3], home=row[3:])


def _damaged(which: str, error: ValueError) -> CorruptMemory:
    return CorruptMemory(f"the row of passage {which} is damaged ({error}); run verify --repair")
