"""Passages that the memory has already: what a writer need not be given of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.runs import Run, run_of
from memstore.disk.format.text_parts import Passage
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest
from memstore.errors import CorruptMemory

Runs = dict[tuple[int, int], Run | None]
"""Runs that were read, by document and first block."""


class Known(NamedTuple):
    """A passage that the memory has."""

    landmarks: np.ndarray | None  # int8 [tokens, width], where the selector keeps some
    stored: bool  # are its keys and values, too, or left to the questions that need them


def known_passages(
    catalog: Catalog, document: Document, passages: Sequence[Passage]
) -> list[Known | None]:
    """What is stored of each of a document's coming passages, whatever document it is of; None of
    one that has to be computed. Raises CorruptMemory.
    """
    digests = catalog.digests(document, passages)
    with catalog.database.read() as txn:
        runs: Runs = {}
        return [_known(catalog, txn, digest, runs) for digest in digests]


def _known(catalog: Catalog, txn: Transaction, digest: Digest, runs: Runs) -> Known | None:
    passage, spec = catalog.passages.find(txn, digest), catalog.runs.spec
    if passage is None:
        return None
    if spec is None or not spec.width:
        return Known(None, passage.bytes > 0)
    try:
        landmarks = _landmarks(catalog, txn, *passage.home, digest, runs)
    except CorruptMemory:  # what is damaged elsewhere is no reason to be as damaged
        return None
    return None if landmarks is None else Known(landmarks, passage.bytes > 0)


def _landmarks(
    catalog: Catalog, txn: Transaction, document: int, block: int, digest: Digest, runs: Runs
) -> np.ndarray | None:
    """The token landmarks of the passage that a block of a document is; None if it is no longer."""
    row = catalog.row(txn, document)
    if row is None or not row.of_passages or block >= row.blocks:
        return None
    if next(catalog.digests_of(txn, row, block, block + 1), None) != (block, digest):
        return None
    part, first = catalog.runs.part("token"), run_of("token", block)
    if (document, first) not in runs:
        runs[document, first] = catalog.runs.run(txn, document, part, first)
    run = runs[document, first]
    found = None if run is None else run.cut(block, block + 1)
    return found.landmarks.copy() if found is not None and len(found.sizes) else None
