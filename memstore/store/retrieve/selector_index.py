"""The index of a memory's selector: token landmarks and words, loaded by the first search of a
document.
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import Kind, kinds_of
from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index.block_rows import Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.word_index import RareBlocks, WordIndex
from memstore.store.retrieve.loading import by_tokens

_AT_ONCE = 1 << 22  # tokens of documents that are read in one transaction


class SelectorIndex:
    """Token landmarks and words that the selector of an open memory searches. Safe for several
    threads.
    """

    def __init__(self, catalog: Catalog, rows: Mapping[int, Document]) -> None:
        """catalog: the tables to read. rows: ready documents, for their sizes; the caller keeps
        them up to date.
        """
        spec = catalog.runs.spec
        assert spec is not None
        self.spec, self.catalog = spec, catalog
        self._tokens = TokenIndex(spec.width)
        self._words = WordIndex()
        self._held: dict[Kind, set[int]] = {kind: set() for kind in kinds_of(spec)}
        self._lock = threading.RLock()
        self.rows = rows

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """For each row, the greatest product of q [R, width] (float32) with each block's token
        landmarks: [R, blocks of the scope].

        A landmark counts as the unit vector that it encodes. Raises InvalidInput for a selector
        without token landmarks, DocumentNotFound, CorruptMemory.
        """
        self._hold("token", scope)
        return self._tokens.maxima(q, scope)

    def word_scores(
        self, words: Mapping[int, float], scope: Scope, whole: Scope | None = None
    ) -> Tensor:
        """BM25 of each block of a scope, [blocks] float32: see WordIndex.scores. Raises as
        token_maxima.
        """
        return self._hold("words", scope if whole is None else whole).scores(words, scope, whole)

    def holding(self, words: Sequence[int], scope: Scope) -> list[int] | None:
        """See WordIndex.holding; None where the selector keeps no words."""
        if "words" not in self._held:
            return None
        return self._hold("words", scope).holding(words, scope)

    def rare(self, words: Mapping[int, float], scope: Scope) -> RareBlocks:
        """See WordIndex.rare."""
        return self._hold("words", scope).rare(words, scope)

    def take_words(self, words: WordIndex, documents: set[int]) -> None:
        """Use an index of words that covers these documents; other documents' words are loaded by
        their next search.
        """
        with self._lock:
            if "words" in self._held:
                self._words, self._held["words"] = words, documents

    def hold(self, scope: Scope) -> None:
        """Load all data for searches of a scope. Raises what a search raises."""
        for kind in self._held:
            self._hold(kind, scope)

    def drop(self, document: int) -> None:
        """Drop all data of a document."""
        with self._lock:
            self._tokens.remove(document)
            self._words.remove(document)
            for held in self._held.values():
                held.discard(document)

    @property
    def bytes(self) -> int:
        """Main memory of landmarks and words."""
        return self._tokens.bytes + self._words.bytes

    def _hold(self, kind: Kind, scope: Scope) -> WordIndex:
        """Load one kind of data for a search of a scope; return the index of words, which
        `take_words` may replace. Raises InvalidInput, DocumentNotFound, CorruptMemory.
        """
        if kind not in self._held:
            what = "token landmarks" if kind == "token" else "words"
            raise InvalidInput(f"selector {self.spec.name} keeps no {what}; ask another way")
        catalog = self.catalog
        with self._lock:
            wanted = {document for document, _, _ in scope}
            if wanted <= self._held[kind]:
                return self._words
            # a published memory stores both kinds together
            kinds = [kind] if catalog.source is None else [*self._held]
            missing = {each: wanted - self._held[each] for each in kinds}
            with catalog.database.read() as txn:
                numbers = sorted(set().union(*missing.values()))
                rows = [self.rows.get(n) or _ready(catalog, txn, n) for n in numbers]
            tokens = [row.tokens for row in rows if row.id in missing.get("token", ())]
            if len(tokens) > 1:
                self._tokens.reserve(sum(tokens))
            for some in by_tokens(rows, _AT_ONCE):
                with catalog.database.read() as txn:
                    catalog.bring(txn, [row.id for row in some], "landmarks")
                    for each, row in product(kinds, some):
                        if row.id in missing[each]:
                            self._load(each, txn, _ready(catalog, txn, row.id))
                            self._held[each].add(row.id)
            return self._words

    def _load(self, kind: Kind, txn: Transaction, row: Document) -> None:
        runs = self.catalog.runs
        run = runs.whole(txn, row, runs.part(kind))
        if kind == "token":
            self._tokens.add(row.id, torch.from_numpy(run.landmarks), run.sizes)
        else:
            self._words.add(row.id, run.words)


def _ready(catalog: Catalog, txn: Transaction, number: int) -> Document:
    row = catalog.row(txn, number) if number > 0 else None
    if row is None or row.state != "ready":
        raise DocumentNotFound(
            f"document {number} of {catalog.database.path} was forgotten or is not ready; list the "
            "memory's documents again"
        )
    return row
