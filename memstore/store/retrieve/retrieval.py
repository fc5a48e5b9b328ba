"""Lookups in an open memory, by its landmark index or its selector, and the tiers that the blocks
found are leased from: what sessions and writers need, and listing documents does not.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, DocumentNotFound, InvalidInput, ReadOnlyMemory
from memstore.index import Hits, LandmarkIndex
from memstore.index.block_rows import Scope
from memstore.index.word_index import WordsBeside
from memstore.store.open_options import OpenOptions
from memstore.store.retrieve.first_stage import FirstStage, ListsDirectory, Shortlist
from memstore.store.retrieve.loading import load_landmarks
from memstore.store.retrieve.selector_index import SelectorIndex
from memstore.store.retrieve.session_document import SessionDocument
from memstore.tiers.cascade import Cascade
from memstore.tiers.disk_tier import DiskTier
from memstore.tiers.policy import TierOptions
from memstore.tiers.raw_bits import torch_dtype
from memstore.tiers.slots import PAGE, UnitShape

_log = logging.getLogger("memstore")


class Retrieval:
    """An index and tiers over a memory's ready documents, as far as `follow` has seen them."""

    def __init__(self, catalog: Catalog, options: OpenOptions) -> None:
        """Raises BudgetExceeded, InvalidConfig, InvalidInput."""
        options, signature, selector = options.copy(), catalog.signature, catalog.index_spec
        kind = options.pop("index", "auto")
        # ready documents whose landmark keys are in the index, or wait to be searched
        self._loaded: dict[int, Document] = {}
        # of a memory with a selector: what that searches
        self.selected = None if selector is None else SelectorIndex(catalog, self._loaded)
        self._first_stage = None
        if self.selected is not None:
            self._first_stage = FirstStage(self.selected, _lists_of(catalog))
        dtype = torch_dtype(signature.kv_dtype)
        self._catalog = catalog
        self.index = LandmarkIndex(
            signature.num_kv_heads,
            signature.head_dim,
            # Searched in float32, or in float64 where keys are stored so (to check the
            # mathematics).
            torch.promote_types(dtype, torch.float32),
            kind=kind if selector is None else "packed",
            device=usable_device(options.get("device") or "cpu"),
            directory=None if catalog.source else catalog.database.path / INDEX,
        )
        size = signature.block_size
        slot = size if selector is None else min(PAGE, size)
        self.tiers = Cascade(
            DiskTier(catalog) if catalog.source is None else catalog.source,
            UnitShape(size, signature.head_dim, dtype, slot),
            computes=selector is not None,
            **cast(TierOptions, options),
        )
        # passages that sessions computed, and of these those that are damaged, or could not be read
        self._computed = {"computed": 0, "damaged": 0, "away": 0}
        # of a memory elsewhere: those that wait, since nothing searched them yet
        self._waiting: dict[int, Document] = {}
        self._leaving = set[int]()  # unpublished documents that stay a while
        self._holding = threading.Lock()
        self._session_numbers = itertools.count(-1, -1)

    def close(self) -> None:
        """End the tiers' threads; idempotent."""
        self.tiers.close()

    # What sessions look up

    def search_landmarks(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        open_rows: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Hits:
        """The top_k blocks of a scope for each row of q [H, T, D] (rotated, scaled): see
        LandmarkIndex.search.

        Raises DocumentNotFound for a document that was forgotten, here or by another process.
        """
        self.hold(scope)
        return self.index.search(
            layer, q, scope, top_k, return_lse=return_lse, open_rows=open_rows, bias=bias
        )

    def landmark_keys(self, layer: int, scope: Scope, candidates: Tensor | None = None) -> Tensor:
        """Landmark keys of candidates of a scope, in float32.

        candidates: [H, ...] int64 as a search returns them (-1 gives some key) -> [H, ..., D], each
        query head from its KV head; None -> [Hkv, N, D], the keys of the whole scope (do not write
        to it). Raises DocumentNotFound.
        """
        self.hold(scope)
        if candidates is None:
            return self.index.keys(layer, scope)
        return self.index.gather(layer, scope, candidates)

    def shortlist(
        self, q: Tensor, weights: Tensor, scope: Scope, beside: WordsBeside | None = None
    ) -> Shortlist | None:
        """The blocks of a large scope that are worth an exact score, where that is the sum over
        rows of weight times the greatest product with a block's token landmarks: proposed by lists
        that `build` made. None where every block is to be scored, or there are no lists.

        q: float32 [T, width]; weights: float32 [T], which sum to 1; beside: words that count, too.
        Raises CorruptMemory.
        """
        listed = None if self._first_stage is None else self._first_stage.open()
        return None if listed is None else listed.shortlist(q, weights, scope, beside)

    def stored_at(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
        """Under which number and block the units of blocks (document, block) are leased: those of a
        passage under its own, whatever documents hold it; None of one whose keys and values are
        neither stored nor held by a cache. Raises DocumentNotFound, CorruptMemory.
        """
        with self._catalog.database.read() as txn:
            found = self._catalog.stored_at(txn, places)
        return [
            at[:2] if at is not None and (at.stored or self._holds(at.number)) else None
            for at in found
        ]

    def _holds(self, passage: int) -> bool:
        """Does a cache hold a passage?"""
        return any(tier.holds(BlockKey(passage, 0, 0, 0)) for tier in self.tiers.caches)

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Units that will probably be leased soon: what is missing is read ahead.

        Returns at once, how many are missing; raises nothing.
        """
        return self.tiers.expect([unit for unit in units if unit.document >= 0])

    def session_document(self) -> SessionDocument:
        """A document for a session's own blocks, that is in main memory only and under a negative
        id.
        """
        number = next(self._session_numbers)
        return SessionDocument(number, self.tiers, self.index)

    # Passages that sessions computed

    def count_computed(self, passages: int, *, damaged: int, away: int) -> None:
        """Count passages that were computed, and how many of them since they are damaged, or could
        not be read.
        """
        with self._holding:
            for name, count in (("computed", passages), ("damaged", damaged), ("away", away)):
                self._computed[name] += count
        if damaged:
            place = self._catalog.database.path
            _log.warning("%s: %d damaged passages were computed again; run verify", place, damaged)

    def take_computed(
        self, document: int, block: int, k: Tensor, v: Tensor, seconds: float
    ) -> None:
        """Hold a passage's keys and values [tokens, width], on the CPU in the KV dtype, for the
        next question; seconds: that computing them took. Nothing is held of a document that is gone
        by now.
        """
        catalog = self._catalog
        self.tiers.count_computed(2 * k.nbytes, seconds)
        try:
            with catalog.database.read() as txn:
                (at,) = catalog.stored_at(txn, [(document, block)])
                codec = catalog.document(txn, document).codec
        except (DocumentNotFound, CorruptMemory):
            return
        if at is not None:
            catalog.share(at.digest, codec, k, v)
            rest = (0, 0, 0, catalog.signature.block_size - len(k))
            unit = BlockKey(at.number, 0, 0, 0)
            self.tiers.host.admit(unit, pad(k, rest), pad(v, rest), len(k))

    # Documents

    def rewritten(self) -> None:
        """The memory's file was made anew without what was erased: hold no index of that."""
        self.index.drop()
        if self._first_stage is not None:
            self._first_stage.close()

    def follow(
        self, txn: Transaction, changed: Mapping[int, Document | None], but: Collection[int]
    ) -> None:
        """Hold what is committed: the landmark keys of those of the `changed` rows that are ready
        (None: a document that is gone), and nothing of the others.

        Documents in `but` are being written here and left alone, and an unpublished document that
        sessions go on reading stays. Raises CorruptMemory.
        """
        changed = {**dict.fromkeys(self._leaving), **changed}
        gone = (number for number, row in changed.items() if row is None)
        self._leaving = {n for n in gone if self._catalog.row(txn, n) is not None}
        new = []
        for number, row in changed.items():
            loaded = self._loaded.get(number)
            if number in but or number in self._leaving or loaded == row:
                continue
            if loaded is not None:
                self.drop(number)
            if row is not None and row.state == "ready":
                new.append(row)
        if self._catalog.source is not None:
            if self.selected is None:
                self._waiting.update({row.id: row for row in new})
        else:
            self.load(txn, *new)
        self._loaded.update({row.id: row for row in new})

    def hold(self, scope: Scope) -> None:
        """Have the landmark keys of the documents of a scope, all layers of them in one go. Raises
        CorruptMemory, StoreUnavailable.
        """
        if not self._waiting or self._waiting.keys().isdisjoint({run[0] for run in scope}):
            return
        with self._holding:
            rows = [self._waiting[n] for n in sorted({run[0] for run in scope} & {*self._waiting})]
            with self._catalog.database.read() as txn:
                self._catalog.bring(txn, [row.id for row in rows], "landmarks")
                self.load(txn, *rows)
            for row in rows:
                if self._waiting.pop(row.id, None) is None:  # gone meanwhile
                    self.index.remove(row.id)

    def hold_documents(self, documents: Iterable[Document]) -> None:
        """Load the search data of these documents of a published memory in one read. Raises
        StoreUnavailable, CorruptMemory.
        """
        if self._catalog.source is None:
            return
        scope = [(document.id, 0, document.blocks) for document in documents]
        if self.selected is None:
            self.hold(scope)
        else:
            self.selected.hold(scope)

    def load(self, txn: Transaction, *rows: Document) -> None:
        """Put documents' landmark keys into the index; what a selector finds by is read when it is
        asked for. Raises CorruptMemory.
        """
        if self.selected is None:
            load_landmarks(self.index, self._catalog, txn, rows)

    def drop(self, number: int) -> None:
        """Hold nothing of a document any longer."""
        self._loaded.pop(number, None)
        self._waiting.pop(number, None)
        self.index.remove(number)
        if self.selected is not None:
            self.selected.drop(number)
        self.tiers.drop_document(number)

    def written(self, number: int, row: Document | None) -> None:
        """A writer has ended: hold what it committed, and nothing that it only staged."""
        if row is not None and row.state == "ready":
            self._loaded[number] = row
        else:
            self.drop(number)

    # The index's engines

    def sampled_queries(self) -> AbstractContextManager[None]:
        """Keep the queries of the searches made meanwhile, all of them exact: what `build` trains
        with. Raises InvalidInput for a packed index.
        """
        return self._building_index().sampled(self._catalog.signature.memory_layers)

    def update_engines(self) -> bool:
        """See MemoryStore.update_index."""
        written = self._catalog.source is not None or not self._catalog.database.read_only
        if self._first_stage is not None:
            return written and self._first_stage.due()
        if self._catalog.source is not None or self.index.kind == "packed":
            return False
        return written and self.index.due(self._catalog.signature.memory_layers)

    def build(self, top_k: int, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """See MemoryStore.build_index."""
        if self._first_stage is None:
            if self._catalog.source is not None:
                raise ReadOnlyMemory(
                    f"{self._catalog.database.path} is published; a reader builds no index there"
                )
            return self._building_index().build(
                self._catalog.signature.memory_layers, top_k, progress
            )
        return self._first_stage.build(progress)

    def tells_of_gone(self) -> bool:
        """Do the stored lists cover documents that are gone or have changed?"""
        return self._first_stage is not None and self._first_stage.tells_of_gone()

    def _building_index(self) -> LandmarkIndex:
        """The index. Raises InvalidInput for one that builds nothing."""
        if self.index.kind == "packed":
            raise InvalidInput("a packed index builds nothing; open the memory with index auto")
        return self.index

    def describe(self) -> dict[str, Any]:
        """What was looked up, and what searches: its part of MemoryStore.stats."""
        return {
            "landmarks": self.index.bytes
            + (self.selected.bytes if self.selected else 0)
            + (self._first_stage.bytes if self._first_stage else 0),
            "tiers": self.tiers.stats(),
            "computed": {**self._computed},
            "index": {
                "searches": self.index.searches,
                "rows": self.index.rows,
                **self.index.describe(),
            },
        }


def _lists_of(catalog: Catalog) -> ListsDirectory:
    """Where the lists of a memory lie: beside it, or where it is published."""
    if catalog.source is None:
        return ListsDirectory(catalog.database.path / INDEX)
    from memstore.store.retrieve.published_lists import PublishedLists

    return PublishedLists(cast(Any, catalog.database))
