"""The table of records: the blocks of a memory's documents, encoded."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

import numpy as np

from memstore.block import RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.keys import read_record_key, record_key, record_range
from memstore.disk.format.record import RecordForm, WriteId, damaged
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.database import Transaction

# The bits of a number's exponent: all of them are set in what is infinite or no number.
_EXPONENTS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}


def is_finite(bits: np.ndarray, dtype: str) -> bool:
    """Are all of these raw bits finite numbers?"""
    exponent = _EXPONENTS[dtype]
    return not (bits & exponent == exponent).any()


class BlockTable:
    """The records of one memory. A record's `write` is the id of the write that made it
    (Document.write_of).
    """

    def __init__(self, signature: Signature, codec: str) -> None:
        """codec: of the records encoded from now on; records say how they are encoded, so a memory
        may hold records of several. Raises InvalidConfig.
        """
        self.geometry = signature.geometry
        self.form = RecordForm(signature.geometry, signature.digest)
        self.codec = get_codec(codec).name

    def encode(
        self, first: RecordKey, k: np.ndarray, v: np.ndarray, lengths: Sequence[int], write: WriteId
    ) -> list[bytes]:
        """The records of consecutive blocks of one layer, by the write that makes them.

        k, v: raw bits [n, num_kv_heads, block_size, head_dim], K rotated by the offset inside the
        block only; lengths: valid content tokens of each, whose rows alone are stored.
        """
        keys = [(first._replace(block=first.block + at), write) for at in range(len(k))]
        records = list[bytes]()
        for length, alike in groupby(lengths):
            at = slice(len(records), len(records) + len(list(alike)))
            halves = k[at, :, :length], v[at, :, :length]
            records += self.form.encode(keys[at], *halves, self.codec)
        return records

    def encode_passage(self, k: np.ndarray, v: np.ndarray, digest: bytes, codec: str) -> bytes:
        """The record of a passage, whose number is not in it. k, v: raw bits [tokens, head_dim];
        digest: its own, which is of this codec.
        """
        known_as = [(RecordKey(0, 0, 0), digest)]
        return self.form.encode(known_as, k[None, None], v[None, None], codec)[0]

    def decode(
        self, record: bytes | memoryview, key: RecordKey, write: WriteId
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Raw bits of K and V [num_kv_heads, block_size, head_dim], and the valid content tokens.
        Raises CorruptBlock for a record that is altered, truncated or not the one asked for.
        """
        record = memoryview(record)
        header = self.form.header(record, key, write)
        k, v = np.empty((2, *self.geometry.shape), f"<i{self.geometry.itemsize}")
        for head in range(self.geometry.num_kv_heads):
            self.form.decode_head(record, key, header, head, (k[head], v[head]))
        return k, v, header.length

    def check(self, record: bytes | memoryview, key: RecordKey, write: WriteId) -> int:
        """Check every byte of a record without decoding it; return its valid content tokens. Raises
        CorruptBlock as decode does.
        """
        return self.form.check(memoryview(record), key, write)

    def check_numbers(self, record: bytes | memoryview, key: RecordKey, write: WriteId) -> None:
        """Does a record decode to finite numbers? Raises CorruptBlock."""
        with np.errstate(all="ignore"):
            k, v, _ = self.decode(record, key, write)
        if not (is_finite(k, self.geometry.dtype) and is_finite(v, self.geometry.dtype)):
            raise damaged(key, "it holds numbers that are not finite")

    def put(self, txn: Transaction, key: RecordKey, record: bytes) -> int:
        """Write one encoded record; return its bytes."""
        txn.put("blocks", record_key(key), record)
        return len(record)

    def walk(
        self, txn: Transaction, document: int, first: int = 0
    ) -> Iterator[tuple[RecordKey, memoryview]]:
        """A document's records from block `first` on, in order of block and layer, as they lie in
        the file: dead once the transaction ends, or writes.
        """
        for key, view in txn.scan("blocks", *record_range(document, first=first)):
            yield read_record_key(key), view

    def delete(self, txn: Transaction, document: int) -> None:
        """Delete all records of a document, or of a passage."""
        txn.delete_range("blocks", *record_range(document))

    def delete_layers(
        self, txn: Transaction, document: int, layers: Collection[int], first: int, end: int
    ) -> int:
        """Delete the records of some layers of blocks `first` to `end` (exclusive); return the
        bytes that were freed.

        For layers without memory, of which only the latest blocks are kept. Records already gone
        are passed over.
        """
        return sum(
            txn.delete("blocks", record_key(RecordKey(document, block, layer)))
            for block in range(first, end)
            for layer in sorted(layers)
        )
