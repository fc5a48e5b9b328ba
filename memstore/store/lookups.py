"""What is looked up in a memory: landmarks that a query points to, and the blocks behind them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from memstore.block import BlockKey
from memstore.disk.tables.document_passages import StoredAt
from memstore.errors import InvalidInput, StoreUnavailable
from memstore.store.open_memory import OpenMemory
from memstore.tiers.tier_options import Predictor

if TYPE_CHECKING:  # these need torch, and what needs it is imported where it is first used
    from torch import Tensor

    from memstore.disk.format.block_words import Words
    from memstore.disk.format.document import Document
    from memstore.index import Hits, Scope
    from memstore.index.word_index import WordsBeside
    from memstore.store.retrieve.selector_index import SelectorIndex
    from memstore.store.retrieve.session_document import SessionDocument
    from memstore.store.retrieve.shortlist import Shortlist
    from memstore.tiers.cascade import Cascade
    from memstore.tiers.lease import Lease


class Lookups(OpenMemory):
    """The verbs of MemoryStore that a session uses, layer by layer."""

    def search_landmarks(
        self,
        layer: int,
        q: "Tensor",
        scope: "Scope",
        top_k: int,
        *,
        return_lse: bool = False,
        open_rows: "Tensor | None" = None,
        bias: "Tensor | None" = None,
    ) -> "Hits":
        """The top_k blocks of a scope for each row of q [H, T, D] (rotated, scaled): see
        PackedIndex.search.

        Raises DocumentNotFound for a document that was forgotten, here or by another process.
        """
        retrieval = self._retrieve()
        retrieval.hold(scope)
        retrieval.open_engines(layer)
        return retrieval.index.search(
            layer, q, scope, top_k, return_lse=return_lse, open_rows=open_rows, bias=bias
        )

    def landmark_keys(
        self, layer: int, scope: "Scope", candidates: "Tensor | None" = None
    ) -> "Tensor":
        """Landmark keys of candidates of a scope, in float32.

        candidates: [H, ...] int64 as a search returns them (-1 gives some key) -> [H, ..., D], each
        query head from its KV head; None -> [Hkv, N, D], the keys of the whole scope (do not write
        to it). Raises DocumentNotFound.
        """
        retrieval = self._retrieve()
        retrieval.hold(scope)
        index = retrieval.index
        if candidates is None:
            return index.keys(layer, scope)
        return index.gather(layer, scope, candidates)

    def token_maxima(self, q: "Tensor", head: int, scope: "Scope") -> "Tensor":
        """How near the nearest token of each block comes to each row: the greatest product of q [R,
        width] (float32) with the block's token landmarks of a head, [R, blocks of the scope].

        A landmark in int8 counts as the unit vector that it stands for. Raises InvalidInput for a
        memory without token landmarks, DocumentNotFound, CorruptMemory.
        """
        return self._select().maxima(q, head, scope)

    def word_scores(self, words: "Mapping[int, float]", scope: "Scope") -> "Tensor":
        """BM25 of each block of a scope, [blocks] float32; words: hash (text_words.split)
        -> weight. See WordIndex.scores. Raises what token_maxima raises.
        """
        return self._select().scores(words, scope)

    def shortlist(
        self, q: "Tensor", weights: "Tensor", scope: "Scope", beside: "WordsBeside | None" = None
    ) -> "Shortlist | None":
        """The blocks of a large scope that are worth an exact score, where that is the sum over
        rows of weight times the greatest product with a block's token landmarks: proposed by lists
        that `build_index` made. None where every block is to be scored, or there are no lists.

        q: float32 [T, width]; weights: float32 [T], which sum to 1; beside: words that count, too.
        Raises CorruptMemory.
        """
        return self._retrieve().shortlist(q, weights, scope, beside)

    def _select(self) -> "SelectorIndex":
        selected = self._retrieve().selected
        if selected is None:
            raise InvalidInput(
                "this memory has no selector; search the landmark keys of its layers instead"
            )
        return selected

    def stored_at(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
        """Under which number and block the units of blocks (document, block) are leased: those of a
        passage under its own, whatever documents hold it; None of one whose keys and values are
        neither stored nor held by a cache. Raises DocumentNotFound, CorruptMemory.
        """
        if self._committed is None:
            return list(places)
        catalog = self._committed.catalog
        stored = [place for place in places if place[0] > 0]
        with catalog.database.read() as txn:
            found = iter(catalog.stored_at(txn, stored))
        told = [next(found) if place[0] > 0 else StoredAt(*place) for place in places]
        return [
            at[:2] if at is not None and (at.stored or self._holds(at)) else None for at in told
        ]

    def _holds(self, at: StoredAt) -> bool:
        """Do the caches hold all units of a passage?"""
        heads = range(self.signature.num_kv_heads)
        return self._retrieval is not None and all(
            any(tier.holds(BlockKey(at.number, layer, 0, head)) for tier in self.tiers.caches)
            for layer in self.signature.memory_layers
            for head in heads
        )

    def note_computed(self, passages: int, *, damaged: int = 0, away: int = 0) -> None:
        """Count passages that a session computed, since their keys and values are not stored or,
        some of them, damaged or not to be had.
        """
        self._built.computed.count(passages=passages, damaged=damaged, away=away)

    def take_computed(
        self, document: int, block: int, k: "Tensor", v: "Tensor", seconds: float
    ) -> None:
        """Hold what a session computed of a passage: see Computed.take."""
        self._built.computed.take(document, block, k, v, seconds)

    def lease(self, units: Sequence[BlockKey]) -> "Lease":
        """Slots of the top tier that hold these units (repeats allowed) until the lease is
        released; of blocks of documents as `stored_at` tells.

        Raises BudgetExceeded (its `fits` says how many distinct units would fit), DocumentNotFound,
        CorruptBlock.
        """
        return self._retrieve().tiers.lease(units)

    @property
    def allow_partial(self) -> bool:
        """Whether sessions leave out what cannot be had (ShareOptions), and say so."""
        return self._committed is not None and self._committed.catalog.allow_partial

    def attached(self, documents: Sequence["Document"]) -> list["Document"]:
        """Those of some documents whose landmarks can be searched: all of them, unless the memory
        allows partial answers. Of a published memory they are read now, together. Raises
        StoreUnavailable, CorruptMemory.
        """
        if self._committed is None or self._committed.catalog.source is None:
            return list(documents)
        retrieval = self._retrieve()
        try:
            retrieval.bring(documents)
            return list(documents)
        except StoreUnavailable:
            if not self.allow_partial:
                raise
        there = []
        for document in documents:
            try:
                retrieval.bring([document])
                there.append(document)
            except StoreUnavailable:
                continue
        return there

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Units that will probably be leased soon: what is missing is read ahead.

        Returns at once, how many are missing; raises nothing.
        """
        return self.tiers.expect([unit for unit in units if unit.document >= 0])

    def session_document(self) -> "SessionDocument":
        """A document for a session's own blocks, that lives in memory only and under a negative
        id.
        """
        from memstore.store.retrieve.session_document import SessionDocument

        retrieval = self._retrieve()
        number = retrieval.next_session_document()
        return SessionDocument(number, retrieval.tiers, retrieval.index, retrieval.selected)

    def add_landmarks(self, document: int, layer: int, keys: "Tensor") -> None:
        """Make the next blocks of a document of `in_memory`'s source known in a layer; best all of
        them at once.

        keys: [n, Hkv, D]. Raises InvalidInput for a memory with a directory, whose documents are
        written, or a number below 1.
        """
        if self._committed is not None or document < 1:
            raise InvalidInput(
                "landmark keys are added to documents above 0 of a memory without a directory"
            )
        self._retrieve().add_landmarks(document, layer, keys)

    def add_selected(
        self,
        document: int,
        lengths: Sequence[int],
        *,
        landmarks: "Tensor | None" = None,
        words: "Sequence[Words] | None" = None,
    ) -> None:
        """Make the next blocks of a document of `in_memory`'s source known to the selector.

        lengths: tokens of each; landmarks, words: as DocumentWriter.add_passages takes them. Raises
        InvalidInput for what the selector does not keep, for a memory with a directory, whose
        documents are written, or a number below 1.
        """
        selected = self._select()
        if self._committed is not None or document < 1:
            raise InvalidInput(
                "what a selector finds by is added to documents above 0 of a memory without a "
                "directory"
            )
        selected.add(document, selected.check(lengths, landmarks=landmarks, words=words))

    @property
    def tiers(self) -> "Cascade":
        """The tiers that leases come from."""
        return self._built.tiers

    @property
    def predictor(self) -> Predictor:
        """How sessions shall predict what to `expect`."""
        return self._options.get("prefetch", "off")

    @property
    def capacity(self) -> int:
        """How many units one lease can hold at most: what the top tier's budget admits."""
        return self.tiers.capacity

    # The index's engines

    def sampled_queries(self) -> AbstractContextManager[None]:
        """Keep the queries of the searches made meanwhile, all of them exact: what `build_index`
        trains with.

        Raises InvalidInput for a packed index.
        """
        return self._retrieve().engines().sampled()

    def build_index(
        self, top_k: int = 4, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build the index's engines anew over every document, and save them; return what was built.

        Queries that were kept by `sampled_queries`, or saved before, tell what to optimise for; a
        head without any looks at everything it has, which is right and slow. top_k: blocks wanted
        of a search. progress: called with (layers done, layers). Of a memory with a selector: lists
        of its token landmarks, by which large scopes are searched in two stages; progress is then
        called with (tokens done, tokens).

        Raises InvalidInput for an index that builds nothing ("packed") or without FAISS,
        CorruptMemory, ReadOnlyMemory, StorageFull.
        """
        retrieval = self._retrieve()
        if self._committed is not None and self._committed.catalog.source is None:
            self._writable()
        return retrieval.build(top_k, progress)

    def update_index(self) -> bool:
        """Bring the index's files up to the documents that came since they were built; is it time
        to build them anew?

        Commands that write documents end with this. Raises StorageFull, ReadOnlyMemory.
        """
        return self._retrieve().update_engines()

    # Counts

    def tier_stats(self) -> dict[str, dict[str, int | float]]:
        """Lookups by tier since the memory was opened, top first: the fields of TierStats by name.

        Caches also have "held" and "budget", in bytes.
        """
        return self.tiers.stats()
