"""Records of several sizes on disk, and a disk tier over them."""

import ctypes
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.memories import data_file
from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.database import Database
from memstore.disk.tables.catalog import Catalog
from memstore.store.writer import COMMIT_BYTES
from memstore.tiers.cascade import DiskTier
from memstore.tiers.raw_bits import raw_view

BATCH = 32
CHUNK_BLOCKS = 8


class Shape(NamedTuple):
    """A record's geometry; values are float16."""

    heads: int
    rows: int
    dim: int

    @property
    def unit(self) -> int:
        """Bytes of one head's K and V."""
        return 4 * self.rows * self.dim

    @property
    def record(self) -> int:
        """Bytes of all heads."""
        return self.heads * self.unit

    @property
    def signature(self) -> Signature:
        """The signature of a model with one layer and records of this shape."""
        return Signature("aa", "bb", {}, "float16", 1, (0,), self.heads, self.dim, self.rows)


SHAPES = {
    "16 KB": Shape(4, 32, 32),
    "49 KB": Shape(3, 64, 64),
    "204 KB": Shape(8, 50, 128),
    "816 KB": Shape(32, 50, 128),
    "2 MB": Shape(32, 128, 128),
    "832 KB": Shape(1, 36, 5_760),  # a passage of SmolLM2-135M: 30 layers x 3 heads x 64
    "4 MB": Shape(1, 32, 32_768),  # of an 8B model: 32 x 8 x 128
}


def random_tensor(*shape: int) -> Tensor:
    """Fresh random bits as float16."""
    bits = np.frombuffer(bytearray(random.randbytes(2 * int(np.prod(shape)))), dtype=np.int16)
    return torch.from_numpy(bits).view(torch.float16).reshape(shape)


class Memory:
    """A memory of one document's records of one layer, and a disk tier over it."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path, self.shape, self.records = path, shape, 0
        self.catalog = Catalog.create(path, shape.signature, codec="raw")
        self.document = Document(1, "noise", "ready", write=os.urandom(16))
        self.database.write(lambda txn: self.catalog.put_document(txn, self.document))
        self.tier = DiskTier(self.catalog)

    @property
    def database(self) -> Database:
        """The database of the open file."""
        return self.catalog.database

    @property
    def file(self) -> Path:
        """The data file."""
        return data_file(self.path)

    def write(self, size: int) -> None:
        """Add records of `size` bytes, in transactions of COMMIT_BYTES."""
        each = max(1, COMMIT_BYTES // self.shape.record)
        with self.database.writer():
            for first in range(self.records, self.records + size // self.shape.record, each):
                end = min(first + each, self.records + size // self.shape.record)
                fresh = [tuple(random_tensor(2, *self.shape)) for _ in range(first, end)]

                def work(
                    txn: Any, first: int = first, end: int = end, fresh: Sequence[Any] = fresh
                ) -> None:
                    for block in range(first, end):
                        key = RecordKey(self.document.id, block, 0)
                        k, v = (raw_view(x)[None] for x in fresh[block - first])
                        rows, write = self.shape.rows, self.document.write
                        (record,) = self.catalog.blocks.encode(key, k, v, [rows], write)
                        self.catalog.blocks.put(txn, key, record)

                self.database.write(work)
        self.records += size // self.shape.record

    def reopen(self) -> None:
        """Close and open the file, so that nothing of it is mapped."""
        self.close()
        self.catalog = Catalog.open(self.path)
        self.tier = DiskTier(self.catalog)

    def close(self) -> None:
        """Close the file."""
        self.catalog.close()

    def sample(self, batches: int) -> list[list[int]]:
        """Batches of random records, none of them twice."""
        drawn = random.sample(range(self.records), batches * BATCH)
        return [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]

    def drop_cache(self) -> float:
        """Drop the file's pages from the page cache and reopen it; returns the share of pages that
        the system kept.
        """
        self.close()
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            kept = resident(file.fileno())
        self.reopen()
        return kept


def resident(file: int) -> float:
    """The share of a file's pages that the page cache holds (mincore)."""
    size = os.fstat(file).st_size
    with mmap.mmap(file, size, prot=mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        array = np.frombuffer(mapped, dtype=np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size), pages
        )
        del array
    assert not failed
    return sum(page & 1 for page in pages) / len(pages)
