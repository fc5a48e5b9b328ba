"""Records of tensors, encoded and decoded alone, as no memory does it."""

import numpy as np
from torch import Tensor

from memstore.block import RecordKey
from memstore.disk.format.keys import record_key
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog
from memstore.tiers.raw_bits import from_raw, raw_view

KEY, WRITE = RecordKey(7, 8, 9), bytes(range(16))


def table_of(
    shape: tuple[int, ...], dtype: str, codec: str = "raw", *, model: str = "aa"
) -> BlockTable:
    """The records of a model with this weights' digest. shape: [num_kv_heads, block_size,
    head_dim].
    """
    heads, rows, dim = shape
    return BlockTable(Signature(model, "bb", {}, dtype, 1, (0,), heads, dim, rows), codec)


def encode(
    k: Tensor,
    v: Tensor,
    length: int,
    codec: str,
    dtype: str,
    key: RecordKey = KEY,
    write: bytes = WRITE,
) -> bytes:
    """The record of one block: K and V [num_kv_heads, block_size, head_dim]."""
    table = table_of(tuple(k.shape), dtype, codec)
    (record,) = table.encode(key, raw_view(k)[None], raw_view(v)[None], [length], write)
    return record


def decode(
    record: bytes, shape: tuple[int, ...], dtype: str, key: RecordKey = KEY, write: bytes = WRITE
) -> tuple[Tensor, Tensor, int]:
    """K, V and the valid content tokens. Raises CorruptBlock."""
    k, v, length = table_of(shape, dtype).decode(record, key, write)
    return from_raw(k, dtype), from_raw(v, dtype), length


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaNs."""
    return a.dtype == b.dtype and np.array_equal(raw_view(a), raw_view(b))


def contents(catalog: Catalog, txn: Transaction) -> dict[bytes, bytes]:
    """Every record of a memory, checked, as its header and payload, without the write that made it:
    the same for two memories that were given the same.
    """
    found = {}
    for document in catalog.documents(txn):
        for key, data in catalog.blocks.walk(txn, document.id):
            write = document.write
            catalog.blocks.check(data, key, write)
            header = catalog.blocks.form.header(data, key, write)
            found[record_key(key)] = repr(header).encode() + data[header.start :]
    return found
