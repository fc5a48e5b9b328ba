"""The lowest tier: records in the database, read a batch at a time into the slots of the tier
above.

Records that the system's page cache holds are copied from the mapped file; for the others, see
memstore.disk.cold_read.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk import cold_read
from memstore.disk.batch import Batch, Slots, Wanted
from memstore.disk.codec import get_codec
from memstore.disk.database import Database, Transaction
from memstore.disk.keys import block_key, block_range, document_key, read_block_key
from memstore.disk.record import DTYPES, HeaderReader, decode_record, encode_record
from memstore.errors import CorruptBlock, DocumentNotFound
from memstore.tiers.stats import TierCounter

_WATCH = 64  # batches for which the disk is asked in advance, after one that needed it
_SLOW = 50e-6  # seconds for a record: beyond, it may have come from the disk
# records at least, or bytes, that are read before it is seen that the disk had to
_FEW, _FEW_BYTES = 8, 1 << 20


class StoredRecord(NamedTuple):
    """One record as it lies in the file. `data` is dead once its transaction ends, or writes."""

    block: int
    layer: int
    data: memoryview


class DiskTier:
    """Blocks as records of a database: the truth that the tiers above cache."""

    def __init__(
        self,
        database: Database,
        *,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        kv_dtype: str,
        codec: str,
    ) -> None:
        """kv_dtype: "float32" | "float16" | "bfloat16"; codec: of the records written from now on.

        Records say how they are encoded, so a memory may hold records of several codecs. Raises
        InvalidConfig.
        """
        self.database = database
        self.shape = (num_kv_heads, block_size, head_dim)
        self.kv_dtype = kv_dtype
        self.codec = get_codec(codec).name
        self.stats = TierCounter()
        self._headers = HeaderReader(self.shape, kv_dtype)
        self._record_bytes = 2 * num_kv_heads * block_size * head_dim * DTYPES[kv_dtype].itemsize
        self._cold = cold_read.ColdReader(database, self._headers)
        # batches to come for which the disk is asked in advance
        self._watch = _WATCH if cold_read.CAN_WATCH else 0
        self._slots: Slots | None = None  # of the latest call; nearly always those of the next

    # Writing

    def write(
        self,
        txn: Transaction,
        document: int,
        block: int,
        layer: int,
        k: Tensor,
        v: Tensor,
        length: int,
    ) -> int:
        """Write one record; return its bytes.

        k, v: [num_kv_heads, block_size, head_dim] in the KV dtype, K rotated by the offset inside
        the block only; length: valid content tokens, less than block_size only for a document's
        closed last block.
        """
        record = encode_record(document, block, layer, k, v, length, self.codec, self.kv_dtype)
        return self.write_record(txn, document, block, layer, record)

    def write_record(
        self, txn: Transaction, document: int, block: int, layer: int, record: bytes
    ) -> int:
        """Write one encoded record under the key that it carries; return its bytes."""
        txn.put("blocks", block_key(document, block, layer), record)
        return len(record)

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete every record of a document; return the bytes that were freed."""
        return txn.delete_range("blocks", *block_range(document))[1]

    def delete_blocks(self, txn: Transaction, document: int, first: int) -> int:
        """Delete every layer's records of the blocks from `first` on; return the bytes that were
        freed.
        """
        return txn.delete_range("blocks", *block_range(document, first=first))[1]

    def delete_layers(
        self, txn: Transaction, document: int, layers: Collection[int], first: int, end: int
    ) -> int:
        """Delete the records of some layers of blocks `first` to `end` (exclusive); return the
        bytes that were freed.

        For layers without memory, of which only the latest blocks are kept. Records already gone
        are passed over.
        """
        keys = (
            block_key(document, block, layer)
            for block in range(first, end)
            for layer in sorted(layers)
        )
        return sum(txn.delete("blocks", key) for key in keys)

    # Reading

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of the slab with unit `units[i]`; return each unit's valid content
        tokens.

        slab: contiguous, on the CPU, [S, 2, block_size, head_dim] in the KV dtype, K before V. One
        read transaction, walked in key order; nothing of the file outlives it. Raises CorruptBlock,
        DocumentNotFound.
        """
        if not units:
            return []
        started = time.perf_counter()
        memory = self._slots
        if memory is None or memory.slab is not slab:
            memory = self._slots = Slots(slab)
        batch = Batch(units, memory, slots, self._headers)
        self._refuse_own(batch.documents)
        rest: Sequence[Wanted] = batch.by_record()
        with self.database.read() as txn:
            if not self._watch:
                rest = self._read_mapped(txn, rest, batch)
            if rest:
                rest, needed = self._cold.read(txn, batch, rest)
                self._watch = _WATCH if needed else max(0, self._watch - 1)
                batch.fill_all(rest, self._views(txn, rest))
        seconds = time.perf_counter() - started
        for layer in set(batch.layers):
            count = batch.layers.count(layer)
            share = seconds * count / len(units)
            self.stats.count(layer, hits=count, bytes=count * batch.unit_bytes, seconds=share)
        return batch.lengths

    def read_block(
        self, txn: Transaction, document: int, block: int, layer: int
    ) -> tuple[Tensor, Tensor, int]:
        """One record whole: K and V [num_kv_heads, block_size, head_dim] and the valid content
        tokens.

        Raises CorruptBlock, DocumentNotFound.
        """
        self._refuse_own([document])
        record: Wanted = (block_key(document, block, layer), document, block, layer, [])
        (view,) = self._views(txn, [record])
        return decode_record(view, document, block, layer, shape=self.shape, dtype=self.kv_dtype)

    def records(self, txn: Transaction, document: int, first: int = 0) -> Iterator[StoredRecord]:
        """A document's records from block `first` on, in order of block and layer, as they lie in
        the file.
        """
        keys = block_range(document, first=first)
        ahead = txn.ahead("blocks", *keys)
        next(ahead, None)
        for key, view in txn.scan("blocks", *keys):
            _, block, layer = read_block_key(key)
            yield StoredRecord(block, layer, view)
            next(ahead, None)

    def _read_mapped(
        self, txn: Transaction, wanted: Sequence[Wanted], batch: Batch
    ) -> Sequence[Wanted]:
        """Copy records from the mapped file, which is fast where the page cache has them; as soon
        as some had to come from the disk, return those that are left.
        """
        before = cold_read.disk_reads()
        each = max(_FEW, _FEW_BYTES // self._record_bytes)
        for start in range(0, len(wanted), each):
            began = time.perf_counter()
            few = wanted[start : start + each]
            batch.fill_all(few, self._views(txn, few))
            if time.perf_counter() - began > _SLOW * len(few) and cold_read.disk_reads() != before:
                self._watch = _WATCH
                return wanted[start + each :]
        return ()

    def _views(self, txn: Transaction, wanted: Sequence[Wanted]) -> list[memoryview]:
        """Records as they lie in the mapped file. Raises CorruptBlock, DocumentNotFound."""
        keys = [record[0] for record in wanted]
        views = txn.views("blocks", keys)
        if len(views) < len(keys):
            self._missing(
                txn, next(record for record in wanted if txn.view("blocks", record[0]) is None)
            )
        return views

    def _refuse_own(self, documents: Sequence[int]) -> None:
        """A session's own blocks are never on disk. Raises DocumentNotFound."""
        document = min(documents)
        if document < 0:
            raise self._forgotten(document)

    def _missing(self, txn: Transaction, record: Wanted) -> NoReturn:
        _, document, block, layer, _ = record
        if txn.view("documents", document_key(document)) is None:
            raise self._forgotten(document)
        raise CorruptBlock(
            f"document {document}, block {block}, layer {layer}: no such record in "
            f"{self.database.path}; run verify"
        )

    def _forgotten(self, document: int) -> DocumentNotFound:
        return DocumentNotFound(
            f"document {document} is not in {self.database.path}: it was forgotten"
        )
