"""Records of tensors, encoded and decoded alone, and a catalog with computed records and a disk
tier.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog
from memstore.tiers.cascade import DiskTier
from memstore.tiers.raw_bits import from_raw, raw_view, torch_dtype

HEADS, ROWS, DIM, LAYERS, BLOCKS = 3, 8, 64, 2, 12
KEY, WRITE = RecordKey(7, 8, 9), b"first write, 16b"


def keys_and_values(
    document: int, layer: int, block: int, dtype: str = "float16"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What block `block` holds, computed anew: [HEADS, ROWS, DIM] each."""
    generator = torch.Generator().manual_seed(document * 10007 + layer * 101 + block)
    k, v = torch.randn(2, HEADS, ROWS, DIM, generator=generator).to(torch_dtype(dtype))
    return k, v


def make(
    path: Path, codec: str = "zstd", dtype: str = "float16", documents: int = 2
) -> tuple[Catalog, DiskTier]:
    """A memory of `documents` ready documents; the last block of each is closed at one token."""
    signature = Signature("aa", "bb", {}, dtype, LAYERS, (1,), HEADS, DIM, ROWS)
    catalog = Catalog.create(path, signature, codec=codec)
    disk = DiskTier(catalog)

    def work(txn: Transaction) -> None:
        for document in range(1, documents + 1):
            size = 0
            for block in range(BLOCKS):
                length = 1 if block == BLOCKS - 1 else ROWS
                for layer in range(LAYERS):
                    k, v = keys_and_values(document, layer, block, dtype)
                    size += write(catalog, txn, RecordKey(document, block, layer), k, v, length)
            row = Document(document, str(document), "ready", blocks=BLOCKS, bytes=size)
            catalog.put_document(txn, replace(row, write=WRITE))

    catalog.database.write(work)
    return catalog, disk


def write(
    catalog: Catalog,
    txn: Transaction,
    key: RecordKey,
    k: torch.Tensor,
    v: torch.Tensor,
    length: int = ROWS,
) -> int:
    """Write one record of a document; return its bytes."""
    (record,) = catalog.blocks.encode(key, raw_view(k)[None], raw_view(v)[None], [length], WRITE)
    return catalog.blocks.put(txn, key, record)


def new_slab(slots: int, dtype: str = "float16") -> torch.Tensor:
    return torch.full((slots, 2, ROWS, DIM), 9.0, dtype=torch_dtype(dtype))


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
