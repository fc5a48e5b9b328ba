"""Load documents' landmark keys from a memory into the landmark index."""

from collections.abc import Iterator, Sequence

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import RUN_BLOCKS, run_of
from memstore.errors import CorruptMemory
from memstore.index import LandmarkIndex
from memstore.tiers.raw_bits import from_raw


def by_tokens(rows: Sequence[Document], least: int) -> Iterator[list[Document]]:
    """Split documents, in their order, into batches of `least` tokens or more, but the last."""
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


def load_landmarks(
    index: LandmarkIndex, catalog: Catalog, txn: Transaction, rows: Sequence[Document]
) -> None:
    """Load documents' landmark keys, replacing those that the index has. Raises CorruptMemory."""
    if len(rows) > 1:
        for layer in catalog.signature.memory_layers:
            index.reserve(layer, sum(row.blocks for row in rows))
    for row in rows:
        index.remove(row.id)
        layers = row.memory_layers(catalog.signature)
        runs = {layer: catalog.runs.whole(txn, row, layer) for layer in layers}
        for layer, run in runs.items():
            index.add(row.id, layer, 0, from_raw(run.landmarks, catalog.signature.kv_dtype))


def load_recent(
    index: LandmarkIndex, catalog: Catalog, txn: Transaction, document: Document, first: int
) -> None:
    """Load landmark keys of layers without memory for a document's blocks from `first` on, which a
    resumed ingest attends to. Raises CorruptMemory.
    """
    end = document.blocks
    for layer in document.other_layers(catalog.signature) if first < end else ():
        grid = range(run_of("landmark", first), end, RUN_BLOCKS["landmark"])
        runs = [catalog.runs.run(txn, document.id, layer, start) for start in grid]
        keys = np.concatenate([run.cut(first, end).landmarks for run in runs if run is not None])
        if len(keys) != end - first:
            raise CorruptMemory(
                f"landmarks of document {document.name!r} before block {end}, layer {layer}, are "
                "missing; run verify"
            )
        index.add(document.id, layer, first, from_raw(keys, catalog.signature.kv_dtype))
