"""The lowest tier: records in the database, read a batch at a time into the slots of the tier above."""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from memstore.block import BlockKey, decode_heads, decode_record, encode_record, raw_view
from memstore.codec import get_codec
from memstore.database import Database, Transaction, block_key, block_range, document_key, read_block_key
from memstore.errors import CorruptBlock, DocumentNotFound
from memstore.tiers.stats import TierCounter

_WARMERS = 8  # threads, most of whose time is waiting for the disk
_WORTH_WARMING = 8  # records
_COLD_SECONDS = 50e-6  # for one record: ten times what a cached one takes


class StoredRecord(NamedTuple):
    """One record as it lies in the file. `data` is dead once its transaction ends, or writes."""

    block: int
    layer: int
    data: memoryview


class DiskTier:
    """Blocks as records of a database: the truth that the tiers above cache."""

    def __init__(
        self, database: Database, *, num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: str, codec: str
    ) -> None:
        """kv_dtype: "float32" | "float16" | "bfloat16"; codec: of the records written from now on.

        Records say how they are encoded, so a memory may hold records of several codecs. Raises InvalidConfig.
        """
        self.database = database
        self.shape = (num_kv_heads, block_size, head_dim)
        self.kv_dtype = kv_dtype
        self.codec = get_codec(codec).name
        self.stats = TierCounter()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    # Writing

    def write(self, txn: Transaction, document: int, block: int, layer: int, k: Tensor, v: Tensor, length: int) -> int:
        """Write one record; return its bytes.

        k, v: [num_kv_heads, block_size, head_dim] in the KV dtype, K rotated by the offset inside the block only;
        length: valid content tokens, less than block_size only for a document's closed last block.
        """
        record = encode_record(document, block, layer, k, v, length, self.codec, self.kv_dtype)
        return self.write_record(txn, document, block, layer, record)

    def write_record(self, txn: Transaction, document: int, block: int, layer: int, record: bytes) -> int:
        """Write one encoded record under the key that it carries; return its bytes."""
        txn.put("blocks", block_key(document, block, layer), record)
        return len(record)

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete every record of a document; return the bytes that were freed."""
        return txn.delete_range("blocks", *block_range(document))[1]

    def delete_blocks(self, txn: Transaction, document: int, first: int) -> int:
        """Delete every layer's records of the blocks from `first` on; return the bytes that were freed."""
        return txn.delete_range("blocks", *block_range(document, first=first))[1]

    def delete_layers(self, txn: Transaction, document: int, layers: Collection[int], first: int, end: int) -> int:
        """Delete the records of some layers of blocks `first` to `end` (exclusive); return the bytes that were freed.

        For layers without memory, of which only the latest blocks are kept. Records already gone are passed over.
        """
        keys = (block_key(document, block, layer) for block in range(first, end) for layer in sorted(layers))
        return sum(txn.delete("blocks", key) for key in keys)

    # Reading

    def read(self, units: Sequence[BlockKey], out_k: Tensor, out_v: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of both slabs with unit `units[i]`; return each unit's valid content tokens.

        out_k, out_v: contiguous CPU slabs [S, block_size, head_dim] in the KV dtype. One read transaction, walked in
        key order; nothing of the file outlives it. Raises CorruptBlock, DocumentNotFound.
        """
        started = time.perf_counter()
        k, v = raw_view(out_k), raw_view(out_v)
        lengths = [0] * len(units)
        # (record key, place in `units`), in the order in which the records lie in the file
        order = sorted(((unit.document, unit.block, unit.layer), place) for place, unit in enumerate(units))
        counts: dict[int, int] = {}
        self._warm([key for key, _ in groupby(order, key=itemgetter(0))])
        with self.database.read() as txn:
            found = [
                (key, [place for _, place in group], self._view(txn, *key))
                for key, group in groupby(order, key=itemgetter(0))
            ]
            for (document, block, layer), places, view in found:
                length = decode_heads(
                    view,
                    document,
                    block,
                    layer,
                    [units[place].head for place in places],
                    [k[slots[place]] for place in places],
                    [v[slots[place]] for place in places],
                    shape=self.shape,
                    dtype=self.kv_dtype,
                )
                for place in places:
                    lengths[place] = length
                counts[layer] = counts.get(layer, 0) + len(places)
        seconds = time.perf_counter() - started
        unit_bytes = 2 * self.shape[1] * self.shape[2] * out_k.element_size()
        for layer, count in counts.items():
            self.stats.count(layer, hits=count, bytes=count * unit_bytes, seconds=seconds * count / len(units))
        return lengths

    def read_block(self, txn: Transaction, document: int, block: int, layer: int) -> tuple[Tensor, Tensor, int]:
        """One record whole: K and V [num_kv_heads, block_size, head_dim] and the valid content tokens.

        Raises CorruptBlock, DocumentNotFound.
        """
        view = self._view(txn, document, block, layer)
        return decode_record(view, document, block, layer, shape=self.shape, dtype=self.kv_dtype)

    def records(self, txn: Transaction, document: int, first: int = 0) -> Iterator[StoredRecord]:
        """A document's records from block `first` on, in order of block and layer, as they lie in the file."""
        for key, view in txn.scan("blocks", *block_range(document, first=first)):
            _, block, layer = read_block_key(key)
            yield StoredRecord(block, layer, view)

    def _warm(self, keys: Sequence[tuple[int, int, int]]) -> None:
        """Have cold records read by several threads at once: one by one they come at a fraction of the disk's speed.

        A sample tells whether they are cold. What the threads leave behind is the system's page cache.
        """
        # Inside a transaction this would wait for threads that may have to wait for that transaction's end.
        if len(keys) < _WORTH_WARMING or self.database.in_transaction:
            return
        if any(self._touch([key]) > _COLD_SECONDS for key in (keys[0], keys[len(keys) // 2], keys[-1])):
            with self._pool_lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_WARMERS, thread_name_prefix="memstore-disk")
            wait([self._pool.submit(self._touch, keys[start::_WARMERS]) for start in range(_WARMERS)])

    def _touch(self, keys: Sequence[tuple[int, int, int]]) -> float:
        """Look records up, which reads their pages; return the seconds it took."""
        with self.database.read() as txn:
            started = time.perf_counter()
            for document, block, layer in keys:
                if document >= 0:
                    txn.view("blocks", block_key(document, block, layer))
            return time.perf_counter() - started

    def _view(self, txn: Transaction, document: int, block: int, layer: int) -> memoryview:
        # A negative number is a session's own document, which is never on disk.
        view = txn.view("blocks", block_key(document, block, layer)) if document >= 0 else None
        if view is not None:
            return view
        if document < 0 or txn.view("documents", document_key(document)) is None:
            raise DocumentNotFound(f"document {document} is not in {self.database.path}: it was forgotten")
        raise CorruptBlock(
            f"document {document}, block {block}, layer {layer}: no such record in {self.database.path}; run verify"
        )
