"""Landmark keys of documents, from a memory into the landmark index; and documents that are read
many at once. Of short ones every part of what they are found by is one run; to read a hundred
thousand of these one after the other takes seconds.
"""

import itertools
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, KeyRun, Kind, Run, Size
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory
from memstore.index import PackedIndex
from memstore.tiers.raw_bits import from_raw

_AT_ONCE = 4096  # documents


def batches(rows: Sequence[Document], kind: Kind) -> Iterator[list[Document]]:
    """These documents in their order: those that have one run of a kind together, others alone."""

    def is_short(row: Document) -> bool:
        return 0 < row.blocks <= RUN_BLOCKS[kind] and row.layers is None

    for short, some in groupby(rows, is_short):
        together, size = list(some), _AT_ONCE if short else 1
        yield from (together[at : at + size] for at in range(0, len(together), size))


def by_tokens(rows: Sequence[Document], least: int) -> Iterator[list[Document]]:
    """These documents in their order, as many together as have so many tokens."""
    some: list[Document] = []
    tokens = 0
    for row in rows:
        some.append(row)
        tokens += row.tokens
        if tokens >= least:
            yield some
            some, tokens = [], 0
    if some:
        yield some


def read_whole(
    txn: Transaction, table: RunTable, part: int, rows: Sequence[Document]
) -> Run | None:
    """One run of all blocks of documents that `batches` puts together: see RunTable.whole."""
    sizes = [Size(row.blocks, row.tokens) for row in rows]
    return table.whole(txn, part, [row.id for row in rows], sizes)


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
