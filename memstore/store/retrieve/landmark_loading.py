"""Documents' landmark keys, from a memory into the landmark index."""

import itertools
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.index import PackedIndex
from memstore.store.retrieve.short_documents import batches, read_whole
from memstore.tiers.raw_bits import from_raw


def load_landmarks(
    index: PackedIndex, catalog: Catalog, txn: Transaction, rows: Sequence[Document]
) -> None:
    """Put documents' landmark keys into the index, in the place of what it has of them. Raises
    CorruptMemory.
    """
    if len(rows) > 1:
        for layer in catalog.signature.memory_layers:
            index.reserve(layer, sum(row.blocks for row in rows))
    for row in rows:
        if index.holds(row.id):
            index.remove(row.id)
    for some in batches(rows, "landmark"):
        if len(some) == 1 or not _load_short(index, catalog, txn, some):
            for row in some:
                _load(index, catalog, txn, row)


def _load_short(
    index: PackedIndex, catalog: Catalog, txn: Transaction, rows: Sequence[Document]
) -> bool:
    """Do as `_load` for documents of `batches`; False, with nothing done, where one of them is
    damaged.
    """
    keys = {}
    for layer in catalog.signature.memory_layers:
        run = read_whole(txn, catalog.runs, layer, rows)
        if not isinstance(run, KeyRun):
            return False
        keys[layer] = from_raw(run.keys, catalog.signature.kv_dtype)
    documents = [(row.id, row.blocks) for row in rows]
    for layer, of_layer in keys.items():
        index.add_new(layer, documents, of_layer)
    return True


def _load(index: PackedIndex, catalog: Catalog, txn: Transaction, document: Document) -> None:
    ends = dict.fromkeys(document.memory_layers(catalog.signature), 0)
    by_layer = itertools.groupby(catalog.runs.runs(txn, document.id), key=itemgetter(0))
    for layer, runs in by_layer:
        if layer in ends:
            keys = []
            for _, run in runs:
                if isinstance(run, KeyRun) and run.first_block == ends[layer]:
                    keys.append(run.keys)
                    ends[layer] = run.end_block
            if keys:
                # one piece: the index grows once
                whole = from_raw(np.concatenate(keys), catalog.signature.kv_dtype)
                index.add(document.id, layer, 0, whole)
    for layer, end in ends.items():
        if end != document.blocks:
            index.remove(document.id)
            raise CorruptMemory(
                f"{catalog.database.path}: landmark keys of document {document.name!r}, "
                f"layer {layer} are missing; run verify"
            )
