"""Memories with a selector, without a model, and the words of their passages."""

from dataclasses import replace
from pathlib import Path

import torch

from memstore.disk.format.signature import Signature
from memstore.disk.tables.runs import IndexSpec
from memstore.store.memory_store import MemoryStore
from support.synthetic_documents import SIGNATURE

PASSAGES = replace(
    SIGNATURE, num_layers=1, memory_layers=(0,), num_kv_heads=1, head_dim=32
)  # a passage is one record
FORM = IndexSpec("test", "ab" * 16, width=8, words=True)
OTHER = IndexSpec("other", "cd" * 16, width=16, words=True)
QUESTION = torch.linspace(-1, 1, 24).view(3, 8)


def create(
    path: Path, form: IndexSpec = FORM, signature: Signature = PASSAGES, **options: object
) -> MemoryStore:
    options = {"host_budget": 1 << 22, **options}  # tiny blocks: a GiB would be millions of slots
    return MemoryStore.create(path, signature, selector=form, **options)


def words(text: int, first: int, end: int) -> list[list[tuple[int, int]]]:
    """Words of blocks first .. end: one that is everywhere, and rarer ones; every tenth block has
    none.
    """
    return [
        []
        if block % 10 == 9
        else [(7, 1 + block % 3), (1000 + (block * 31 + text) % 40, 2), (1 << 31 | block, 1)]
        for block in range(first, end)
    ]


def selected(path: Path) -> dict[str, object]:
    """All that a memory's documents are found by, as its tables hold it."""
    from memstore.disk.tables.catalog import Catalog

    catalog = Catalog.open(path, read_only=True)
    try:
        with catalog.database.read() as txn:
            return {
                "form": catalog.index_spec,
                "landmarks": {key: bytes(value) for key, value in txn.scan("landmarks")},
            }
    finally:
        catalog.close()
