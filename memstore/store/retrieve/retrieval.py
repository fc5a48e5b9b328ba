"""Lookups in an open memory, for sessions and writers: its landmark index, or its selector's index
of token landmarks and words; and the tiers from which found blocks are leased.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.devices import usable_device
from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import Kind, kinds_of
from memstore.errors import CorruptMemory, DocumentNotFound, InvalidInput, ReadOnlyMemory
from memstore.index import LandmarkIndex
from memstore.index.block_rows import Scope
from memstore.index.late_interaction import TokenIndex
from memstore.index.word_index import RareBlocks, WordIndex, WordsBeside
from memstore.store.open_options import OpenOptions
from memstore.store.retrieve.first_stage import FirstStage, ListsDirectory, Shortlist, by_tokens
from memstore.tiers.cascade import Cascade, DiskTier
from memstore.tiers.policy import TierOptions
from memstore.tiers.raw_bits import from_raw, torch_dtype
from memstore.tiers.slots import PAGE, UnitShape

_AT_ONCE = 1 << 22  # tokens of documents that are read in one transaction
_log = logging.getLogger("memstore")


class Retrieval:
    """An index and tiers over a memory's ready documents, as of the last `follow`."""

    def __init__(self, catalog: Catalog, options: OpenOptions) -> None:
        """Raises BudgetExceeded, InvalidConfig, InvalidInput."""
        options, signature, selector = options.copy(), catalog.signature, catalog.index_spec
        kind = options.pop("index", "auto")
        # ready documents whose landmark keys are in the index, or are loaded at the next search
        self._loaded: dict[int, Document] = {}
        # the index of a memory with a selector
        self.selected = None if selector is None else SelectorIndex(catalog, self._loaded)
        self._first_stage = None
        if self.selected is not None:
            self._first_stage = FirstStage(self.selected, _lists_of(catalog))
        dtype = torch_dtype(signature.kv_dtype)
        self._catalog = catalog
        self.index = LandmarkIndex(
            signature.num_kv_heads,
            signature.head_dim,
            # float32, or float64 where keys are stored in float64 (to check the mathematics)
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
        # passages that sessions computed, and how many of them were damaged or unavailable
        self._computed = {"computed": 0, "damaged": 0, "away": 0}
        # documents of a published memory whose landmark keys no search has loaded yet
        self._waiting: dict[int, Document] = {}
        self._leaving = set[int]()  # unpublished documents that running sessions may still use
        self._holding = threading.Lock()
        self._session_numbers = itertools.count(-1, -1)

    # Lookups of sessions

    def landmarks(self, scope: Scope) -> LandmarkIndex:
        """The index, with the landmark keys of a scope's documents loaded, all layers in one read.
        Its searches raise DocumentNotFound for a document that any process has forgotten. Raises
        CorruptMemory, StoreUnavailable.
        """
        if not self._waiting or self._waiting.keys().isdisjoint({run[0] for run in scope}):
            return self.index
        with self._holding:
            rows = [self._waiting[n] for n in sorted({run[0] for run in scope} & {*self._waiting})]
            with self._catalog.database.read() as txn:
                self._catalog.bring(txn, [row.id for row in rows], "landmarks")
                self.load(txn, *rows)
            for row in rows:
                if self._waiting.pop(row.id, None) is None:  # dropped concurrently
                    self.index.remove(row.id)
        return self.index

    def shortlist(
        self,
        q: Tensor,
        weights: Tensor,
        scope: Scope,
        beside: WordsBeside | None = None,
        around: tuple[int, int] | None = None,
    ) -> Shortlist | None:
        """Blocks of a large scope that the lists of `build` propose for exact scoring; None without
        lists, or where every block should be scored. A block's exact score is the sum over rows of
        weight times the greatest product with its token landmarks.

        q: float32 [T, width]; weights: float32 [T], which sum to 1; beside: words that also count;
        around: document and block, around which blocks are proposed, too. Raises CorruptMemory.
        """
        listed = None if self._first_stage is None else self._first_stage.open()
        return None if listed is None else listed.shortlist(q, weights, scope, beside, around)

    def stored_at(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
        """The number and block to lease for each (document, block): a passage has one number in
        all documents that hold it. None where keys and values are neither stored nor cached.
        Raises DocumentNotFound, CorruptMemory.
        """
        with self._catalog.database.read() as txn:
            found = self._catalog.stored_at(txn, places)
        return [
            at[:2] if at is not None and (at.stored or self._holds(at.number)) else None
            for at in found
        ]

    def _holds(self, passage: int) -> bool:
        """Whether a cache holds a passage."""
        return any(tier.holds(BlockKey(passage, 0, 0, 0)) for tier in self.tiers.caches)

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Prefetch units that will probably be leased soon; return at once, with the number of
        missing ones. Raises nothing.
        """
        return self.tiers.expect([unit for unit in units if unit.document >= 0])

    def session_document(self) -> "SessionDocument":
        """A document for a session's own blocks, in main memory only, with a negative id."""
        return SessionDocument(next(self._session_numbers), self.tiers, self.index)

    # Passages that sessions computed

    def count_computed(self, passages: int, *, damaged: int, away: int) -> None:
        """Count computed passages, and how many of them were damaged, or unavailable (`away`)."""
        with self._holding:
            for name, count in (("computed", passages), ("damaged", damaged), ("away", away)):
                self._computed[name] += count
        if damaged:
            place = self._catalog.database.path
            _log.warning("%s: %d damaged passages were computed again; run verify", place, damaged)

    def take_computed(
        self, document: int, block: int, k: Tensor, v: Tensor, seconds: float
    ) -> None:
        """Cache a computed passage's keys and values [tokens, width], on the CPU in the KV dtype,
        for later questions, unless its document was deleted. seconds: the time to compute them.
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
        """Drop the index: the memory's file was rewritten without erased documents."""
        self.index.drop()
        if self._first_stage is not None:
            self._first_stage.close()

    def follow(
        self, txn: Transaction, changed: Mapping[int, Document | None], but: Collection[int]
    ) -> None:
        """Load the landmark keys of `changed` rows that are ready, and drop those of the others
        (None: a deleted document).

        Documents in `but` are being written by this process and are skipped; an unpublished
        document that sessions still use stays. Raises CorruptMemory.
        """
        changed = {**dict.fromkeys(self._leaving), **changed}
        gone = (number for number, row in changed.items() if row is None)
        self._leaving = {n for n in gone if self._catalog.row(txn, n) is not None}
        new = []
        for number, row in changed.items():
            loaded = self._loaded.get(number)
            if number in but or number in self._leaving:
                continue
            if loaded is not None and row is not None and loaded.write == row.write:
                self._loaded[number] = row  # new metadata, the same content
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

    def hold_documents(self, documents: Iterable[Document]) -> None:
        """Load the search data of these documents of a published memory in one read. Raises
        StoreUnavailable, CorruptMemory.
        """
        if self._catalog.source is None:
            return
        scope = [(document.id, 0, document.blocks) for document in documents]
        if self.selected is None:
            self.landmarks(scope)
        else:
            self.selected.hold(scope)

    def load(self, txn: Transaction, *rows: Document) -> None:
        """Load documents' landmark keys into the index, replacing those that it has; the first
        search loads a selector's data. Raises CorruptMemory.
        """
        if self.selected is not None:
            return
        index, catalog, signature = self.index, self._catalog, self._catalog.signature
        if len(rows) > 1:
            for layer in signature.memory_layers:
                index.reserve(layer, sum(row.blocks for row in rows))
        for row in rows:
            index.remove(row.id)
            layers = row.memory_layers(signature)
            runs = {layer: catalog.runs.whole(txn, row, layer) for layer in layers}
            for layer, run in runs.items():
                index.add(row.id, layer, 0, from_raw(run.landmarks, signature.kv_dtype))

    def drop(self, number: int) -> None:
        """Drop all data of a document."""
        self._loaded.pop(number, None)
        self._waiting.pop(number, None)
        self.index.remove(number)
        if self.selected is not None:
            self.selected.drop(number)
        self.tiers.drop_document(number)

    def written(self, number: int, row: Document | None) -> None:
        """After a writer has ended: keep what it committed, and drop what it only staged."""
        if row is not None and row.state == "ready":
            self._loaded[number] = row
        else:
            self.drop(number)

    # The index's engines

    def sampled_queries(self) -> AbstractContextManager[None]:
        """Record the queries of all searches in this context, for `build` to train with; these
        searches are exact. Raises InvalidInput for a packed index.
        """
        return self._building_index().sampled(self._catalog.signature.memory_layers)

    def update_engines(self) -> bool:
        """Whether the index should be built again: see MemoryStore.update_index."""
        published = self._catalog.source is not None
        if self._catalog.database.read_only and not published:
            return False
        if self._first_stage is not None:
            return self._first_stage.due()
        if published or self.index.kind == "packed":
            return False
        return self.index.due(self._catalog.signature.memory_layers)

    def build(self, top_k: int, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Build and store the index: see MemoryStore.build_index."""
        if self._first_stage is not None:
            return self._first_stage.build(progress)
        if self._catalog.source is not None:
            raise ReadOnlyMemory(
                f"{self._catalog.database.path} is published; build the index in its directory"
            )
        layers = self._catalog.signature.memory_layers
        return self._building_index().build(layers, top_k, progress)

    def tells_of_gone(self) -> bool:
        """Whether the stored lists cover documents that were deleted or changed."""
        return self._first_stage is not None and self._first_stage.tells_of_gone()

    def _building_index(self) -> LandmarkIndex:
        """The landmark index. Raises InvalidInput if it is of a kind that builds nothing."""
        if self.index.kind == "packed":
            raise InvalidInput("a packed index builds nothing; open the memory with index auto")
        return self.index

    def describe(self) -> dict[str, Any]:
        """Statistics of lookups and of the index: its part of MemoryStore.stats."""
        index, held = self.index, (self.index, self.selected, self._first_stage)
        return {
            "landmarks": sum(one.bytes for one in held if one is not None),
            "tiers": self.tiers.stats(),
            "computed": {**self._computed},
            "index": {"searches": index.searches, "rows": index.rows, **index.describe()},
        }


def _lists_of(catalog: Catalog) -> ListsDirectory:
    """Where a memory's lists are stored: in its directory, or with its publication."""
    if catalog.source is None:
        return ListsDirectory(catalog.database.path / INDEX)
    from memstore.store.retrieve.published_lists import PublishedLists

    return PublishedLists(cast(Any, catalog.database))


# Blocks of a session


class SessionDocument(Closing):
    """A session's own blocks, pinned and searchable until it is closed. A context manager.

    document: the negative number to lease and search them by.
    """

    def __init__(self, number: int, tiers: Cascade, index: LandmarkIndex) -> None:
        """Use Retrieval.session_document."""
        self.document = number
        self._tiers, self._index = tiers, index
        # layer -> units of each block, oldest first
        self._units: dict[int, list[list[BlockKey]]] = {}
        self._ends: dict[int, int] = {}

    def add(self, layer: int, k: Tensor, v: Tensor, landmarks: Tensor | None = None) -> int:
        """Add the next n blocks of a layer; return the number of the first.

        k, v: [n, Hkv, block_size, D] in the KV dtype, K rotated by the offset in the block only;
        landmarks: [n, Hkv, D]; None for blocks that are not searched. Raises BudgetExceeded, with
        nothing added.
        """
        n, heads = k.shape[:2]
        first = self._ends.get(layer, 0)
        units = self._tiers.host.pin(self.document, layer, first, k, v)
        if landmarks is not None:
            self._index.add(self.document, layer, first, landmarks)
        self._units.setdefault(layer, []).extend(
            units[at : at + heads] for at in range(0, n * heads, heads)
        )
        self._ends[layer] = first + n
        return first

    def blocks(self, layer: int) -> tuple[int, int]:
        """The blocks [first, end) of a layer."""
        end = self._ends.get(layer, 0)
        return end - len(self._units.get(layer, [])), end

    def trim(self, first_block: int, layers: Sequence[int] | None = None) -> None:
        """Drop blocks before first_block, in these layers or in all."""
        for layer in list(self._units) if layers is None else layers:
            held = self._units.get(layer, [])
            gone = max(0, min(first_block - self.blocks(layer)[0], len(held)))
            if gone:
                self._tiers.drop([unit for units in held[:gone] for unit in units])
                self._units[layer] = held[gone:]
                self._index.trim(self.document, first_block, layer)

    def close(self) -> None:
        """Drop all blocks; idempotent."""
        units, self._units, self._ends = self._units, {}, {}
        self._tiers.drop([unit for blocks in units.values() for block in blocks for unit in block])
        self._index.remove(self.document)


# The index of a selector


class SelectorIndex:
    """Token landmarks and words that the selector of an open memory searches, loaded by the first
    search of a document. Safe for several threads.
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
        """See WordIndex.holding; None if the selector stores no words."""
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
            raise InvalidInput(f"selector {self.spec.name} does not search {what}")
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
            f"document {number} of {catalog.database.path} was removed or is not ready; list the "
            "memory's documents again"
        )
    return row
