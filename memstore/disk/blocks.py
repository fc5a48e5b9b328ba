"""The table of records: what the blocks of a memory's documents are, encoded."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from memstore.block import Geometry, RecordKey
from memstore.disk.codec import get_codec
from memstore.disk.database import Transaction
from memstore.disk.keys import read_record_key, record_key, record_range
from memstore.disk.record import check_record, decode_record, encode_records


class StoredRecord(NamedTuple):
    """One record as it lies in the file. `data` is dead once its transaction ends, or writes."""

    key: RecordKey
    data: memoryview


class BlockTable:
    """The records of one memory. `write` is the id of the write that made a record
    (Document.write_of); None for a record of format 1.
    """

    def __init__(self, geometry: Geometry, codec: str) -> None:
        """codec: of the records encoded from now on; records say how they are encoded, so a memory
        may hold records of several. Raises InvalidConfig.
        """
        self.geometry = geometry
        self.codec = get_codec(codec).name

    def encode(
        self, first: RecordKey, k: np.ndarray, v: np.ndarray, last_length: int, write: bytes | None
    ) -> list[bytes]:
        """The records of consecutive blocks of one layer.

        k, v: raw bits [n, num_kv_heads, block_size, head_dim], K rotated by the offset inside the
        block only; last_length: valid content tokens of the last, less than block_size only for a
        document's closed last block.
        """
        return encode_records(first, k, v, last_length, self.codec, self.geometry)

    def decode(
        self, record: bytes | memoryview, key: RecordKey, write: bytes | None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Raw bits of K and V [num_kv_heads, block_size, head_dim], and the valid content tokens.
        Raises CorruptBlock.
        """
        return decode_record(record, key, self.geometry)

    def check(self, record: bytes | memoryview, key: RecordKey, write: bytes | None) -> int:
        """Check every byte of a record; return its valid content tokens. Raises CorruptBlock."""
        return check_record(record, key, self.geometry)

    def put(self, txn: Transaction, key: RecordKey, record: bytes) -> int:
        """Write one encoded record; return its bytes."""
        txn.put("blocks", record_key(key), record)
        return len(record)

    def walk(self, txn: Transaction, document: int, first: int = 0) -> Iterator[StoredRecord]:
        """A document's records from block `first` on, in order of block and layer, as they lie in
        the file.
        """
        keys = record_range(document, first=first)
        ahead = txn.ahead("blocks", *keys)
        next(ahead, None)
        for key, view in txn.scan("blocks", *keys):
            yield StoredRecord(read_record_key(key), view)
            next(ahead, None)

    def delete(self, txn: Transaction, document: int, first: int = 0) -> int:
        """Delete every layer's records of the blocks from `first` on; return the bytes that were
        freed.
        """
        return txn.delete_range("blocks", *record_range(document, first=first))[1]

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
