"""Passages that the memory has already: what a writer need not be given of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.runs import TokenRun, run_of
from memstore.disk.format.text_parts import Passage
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest
from memstore.errors import CorruptMemory


class Known(NamedTuple):
    """A passage that the memory has."""

    landmarks: np.ndarray | None  # int8 [tokens, width], where the selector keeps some
    stored: bool  # are its keys and values, too, or left to the questions that need them


class KnownPassages:
    """Looks passages of one document up among those of all documents. Of one thread."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        self._catalog, self._document = catalog, document
        # that were read last, by one call: of a document and block, and of a document from a block
        self._run: tuple[tuple[int, int], TokenRun] | None = None
        self._part: tuple[int, int, list[Digest]] | None = None

    def look_up(self, passages: Sequence[Passage]) -> list[Known | None]:
        """What is known of each of these passages; None: it has to be computed. Raises
        CorruptMemory.
        """
        digests = self._catalog.digests(self._document, passages)
        self._part = self._run = None  # which others may have written anew since
        with self._catalog.database.read() as txn:
            return [self._known(txn, digest) for digest in digests]

    def _known(self, txn: Transaction, digest: Digest) -> Known | None:
        row = self._catalog.passages.find(txn, digest)
        if row is None:
            return None
        stored = row.bytes > 0
        spec = self._catalog.runs.spec
        if spec is None or not spec.width:
            return Known(None, stored)
        try:
            landmarks = self._landmarks(txn, *row.home, digest)
        except CorruptMemory:  # what is damaged elsewhere is no reason to be as damaged
            return None
        return None if landmarks is None else Known(landmarks, stored)

    def _landmarks(
        self, txn: Transaction, document: int, block: int, digest: Digest
    ) -> np.ndarray | None:
        """The token landmarks of the passage that stands there; None if it does not any more."""
        part = self._part
        if part is None or part[0] != document or not 0 <= block - part[1] < len(part[2]):
            part = self._read_part(txn, document, block)
        if part is None or part[2][block - part[1]] != digest:
            return None
        first = run_of("token", block)
        if self._run is None or self._run[0] != (document, first):
            runs = self._catalog.runs
            run = runs.run(txn, document, runs.part("token"), first)
            if not isinstance(run, TokenRun):
                return None
            self._run = (document, first), run
        run = self._run[1].cut(block, block + 1)
        return run.landmarks.copy() if len(run.lengths) else None

    def _read_part(
        self, txn: Transaction, document: int, block: int
    ) -> tuple[int, int, list[Digest]] | None:
        row = self._catalog.row(txn, document)
        if row is None or not row.of_passages or block >= row.blocks:
            return None
        found = next(self._catalog.texts.passage_parts(txn, document, block, block + 1), None)
        if found is None or not found.first_block <= block < found.end_block:
            return None
        digests = self._catalog.digests(row, found.passages)
        self._part = document, found.first_block, digests
        return self._part
