"""Passages by their content: what is told of each, under a number, whatever documents hold it.

A passage is known by its digest, of all that its keys and values follow from: the memory's
signature, the codec of its records and its tokens, those of the context in front included. Of its
number (`passages`) the digest is told, the references, the bytes of its records (0: none is
stored), its worth, and the document and block that referred to it last; of its digest (`digests`)
the number.
"""

import hashlib
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from memstore.decode import Block, Count, unpack
from memstore.disk.format.keys import passage_key, read_passage_key
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import CorruptMemory

DIGEST_BYTES = 16
Digest = bytes


def digest_of(signature: bytes, codec: str, ids: np.ndarray) -> Digest:
    """The digest of a passage of these tokens; signature: Signature.digest."""
    content = b"".join((signature, codec.encode(), b"\0", np.asarray(ids).astype("<u4").tobytes()))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class StoredPassage(NamedTuple):
    """What is told of a passage."""

    number: int
    digest: Digest
    references: int  # of documents' lists; one that holds it twice counts twice
    bytes: int  # of its records; 0: none is stored
    worth: int  # the least are dropped first
    home: tuple[int, int]  # document and block that referred to it last


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    references: Count
    bytes: Count
    worth: Count
    document: Count
    block: Block


class PassageRows:
    """The rows of one memory's passages. Every method takes the transaction it works in."""

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
        """What is told of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("passages", passage_key(number))
        return None if value is None else _decode(number, value)

    def find(self, txn: Transaction, digest: Digest) -> StoredPassage | None:
        """What is told of the passage of a digest, or None. Raises CorruptMemory."""
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
            yield _decode(read_passage_key(key), value)

    def put(self, txn: Transaction, row: StoredPassage) -> None:
        """Write what is told of a passage whose records and worth are as they were."""
        told = [row.digest, row.references, row.bytes, row.worth, *row.home]
        txn.put_checked("passages", passage_key(row.number), msgpack.packb(told))

    def put_number(self, txn: Transaction, row: StoredPassage) -> None:
        """Have a passage be found by its digest."""
        txn.put_checked("digests", row.digest, msgpack.packb(row.number))

    def delete(self, txn: Transaction, row: StoredPassage) -> None:
        """Tell nothing of a passage any longer; its records are somebody else's to delete."""
        txn.delete("passages", passage_key(row.number))
        txn.delete("digests", row.digest)


def _decode(number: int, value: bytes) -> StoredPassage:
    try:
        row = unpack(value, _Row)
    except ValueError as error:
        raise _damaged(str(number), error) from error
    home = row.document, row.block
    return StoredPassage(number, row.digest, row.references, row.bytes, row.worth, home)


def _damaged(which: str, error: ValueError) -> CorruptMemory:
    return CorruptMemory(
        f"what is told of passage {which} is damaged ({error}); run verify --repair"
    )
