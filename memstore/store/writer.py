"""Write one document into a memory: chunks are staged, then encoded and committed in the
background, whole chunks at a time.

A staged chunk is searchable and readable at once (pinned units, index rows), because later chunks
attend to it; passages are so after their commit. After a kill at any instant, the memory holds a
prefix of whole chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import RUN_BLOCKS, Run, Words, run_of
from memstore.disk.tables.texts import Digest, Passage
from memstore.errors import BudgetExceeded, CorruptMemory, StorageFull
from memstore.index import LandmarkIndex
from memstore.store.chunks import Chunk, Commits, KeysValues, LayerBlocks, check_batch, check_chunk
from memstore.store.retrieve.retrieval import Retrieval
from memstore.tiers.raw_bits import from_raw, torch_dtype

COMMIT_BYTES = 16 << 20  # keys and values of memory layers in a transaction, about

Runs = dict[tuple[int, int], Run | None]
"""Cached runs of token landmarks, by document and first block."""


class Known(NamedTuple):
    """A passage that the memory has already."""

    landmarks: np.ndarray | None  # int8 [tokens, width]; None for a selector without them
    stored: bool  # are its keys and values stored; else questions compute them


class DocumentWriter(Closing):
    """Writer of one document; a context manager. Use MemoryStore.write_document.

    Leaving without `finish` (an error, Ctrl-C) commits the whole chunks that were staged and leaves
    the document "ingesting", to be resumed. Tensors given to add_chunk belong to the writer
    afterwards: do not write to them. For one thread; other threads may write other documents
    concurrently.

    blocks, tokens, characters (for passages): counts so far, staged ones included; an ingest
    continues from there.
    """

    def __init__(
        self,
        catalog: Catalog,
        retrieval: Retrieval,
        document: Document,
        replaces: Document | None,
        on_close: Callable[["DocumentWriter"], None],
        commit_bytes: int | None = None,
    ) -> None:
        """document: its stored row; replaces: the document to delete when this one is ready;
        on_close: called after the last commit. Raises CorruptMemory.
        """
        self._catalog, self._retrieval, self._on_close = catalog, retrieval, on_close
        self._memory_layers = set(document.memory_layers(catalog.signature))
        self._other_layers = document.other_layers(catalog.signature)
        self._commits = Commits(catalog, document, replaces)
        last: list[Passage] = []
        with catalog.database.read() as txn:
            retrieval.load(txn, document)
            if document.of_passages:
                last = catalog.texts.passages(txn, document, max(0, document.blocks - 1))
            else:
                latest = self._commits.keep_from(document.blocks)
                _load_recent(retrieval.index, catalog, txn, document, latest)
        self._commit_bytes = COMMIT_BYTES if commit_bytes is None else commit_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-writer")
        self._committing: Future[None] | None = None  # the transaction submitted last
        self._staged: list[Chunk] = []
        self._staged_bytes = 0
        self._pinned: list[BlockKey] = []  # committed blocks that the next chunks attend to
        self.blocks, self.tokens = document.blocks, document.tokens
        self.characters = last[0].end if last else 0
        self._finished = False
        self._closed = False

    @property
    def document(self) -> Document:
        """The committed row of the document."""
        return self._commits.row

    # Chunks of a landmark model

    def add_chunk(
        self,
        token_ids: Sequence[int] | np.ndarray,
        char_start: int,
        layers: Mapping[int, LayerBlocks],
        length_of_last: int | None = None,
    ) -> None:
        """Add the next chunk: chunk_blocks blocks, or fewer at the document's end.

        token_ids: content tokens of the chunk. char_start: characters of the document before its
        first token. layers: for every layer K, V [n, Hkv, block_size, D] (K rotated by the offset
        in the block) and landmark keys [n, Hkv, D]. length_of_last: content tokens of the last
        block, if the document's end leaves it short.

        Waits when storage is far behind. Raises what committing raised (StorageFull, ...),
        BudgetExceeded, InvalidInput.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        chunk = check_chunk(
            self._catalog, self.document, self.blocks, ids, char_start, layers, length_of_last
        )
        self._commits.replace_by_stored(chunk)
        self._show(chunk)
        self._stage(chunk, sum(2 * layers[layer][0].nbytes for layer in self._memory_layers))

    def recent_landmarks(self, layer: int, n: int) -> Tensor:
        """Landmark keys [n, Hkv, D] of the latest n blocks, staged or stored, in their stored
        precision, so that a resumed ingest attends to equal keys; fewer at a document's beginning,
        and at most top_k for a layer without memory.
        """
        first = max(0, self.blocks - n)
        if layer in self._other_layers:
            first = max(first, self._commits.keep_from(self.blocks))
        keys = self._retrieval.index.keys(layer, [(self.document.id, first, self.blocks)])
        return keys.transpose(0, 1).to(torch_dtype(self._catalog.signature.kv_dtype))

    def _show(self, chunk: Chunk) -> None:
        """Pin a chunk's blocks and add its landmarks to the index. Raises BudgetExceeded."""
        try:
            chunk.units = self._pin(chunk)
        except BudgetExceeded:  # committed blocks need no pin
            self._submit()
            self._wait()
            chunk.units = self._pin(chunk)
        index, document = self._retrieval.index, self.document.id
        for layer, run in sorted(chunk.runs.items()):
            keys = from_raw(run.landmarks, self._catalog.signature.kv_dtype)
            index.add(document, layer, chunk.first_block, keys)
            if layer in self._other_layers:
                index.trim(document, self._commits.keep_from(chunk.end_block), layer)

    def _pin(self, chunk: Chunk) -> list[BlockKey]:
        host, units = self._retrieval.tiers.host, list[BlockKey]()
        try:
            for layer, (k, v) in chunk.blocks.items():
                units += host.pin(self.document.id, layer, chunk.first_block, k, v, chunk.lengths)
        except BudgetExceeded:
            self._retrieval.tiers.drop(units)
            raise
        return units

    # Passages

    def known(self, passages: Sequence[Passage]) -> list[Known | None]:
        """A Known for each of these passages that any document of the memory has, else None.

        `add_passages` needs no keys and values of a stored passage. If all documents that hold it
        are forgotten before this one is committed, questions compute them. Raises CorruptMemory.
        """
        runs: Runs = {}
        digests = self._catalog.digests(self.document, passages)
        with self._catalog.database.read() as txn:
            return [_known(self._catalog, txn, digest, runs) for digest in digests]

    def add_passages(
        self,
        passages: Sequence[Passage],
        kv: Sequence[KeysValues],
        *,
        given: Sequence[int] | None = None,
        landmarks: Tensor | None = None,
        words: Sequence[Words] | None = None,
    ) -> None:
        """Add the next n >= 1 passages, one a block.

        kv: K, V [tokens, width] of m passages in the KV dtype, which belong to the writer
        afterwards. given: the positions of these m among the n, ascending (None: all); the others
        get no keys and values unless they are stored already (`known`). landmarks: int8 [tokens of
        all n, landmark width]; words: for each passage its distinct words (hash, count). Questions
        find the passages once the document is ready.

        Waits when storage is far behind. Raises what committing raised (StorageFull, ...),
        InvalidInput.
        """
        at = self.blocks, self.tokens, self.characters
        given = range(len(passages)) if given is None else given
        of_given = dict(zip(given, kv, strict=True))
        chunk = check_batch(self._catalog, self.document, at, passages, of_given, landmarks, words)
        self.characters = chunk.end
        self._stage(chunk, sum(k.nbytes + v.nbytes for k, v in kv))

    # Committing

    def _stage(self, chunk: Chunk, size: int) -> None:
        """Stage a chunk of `size` bytes; commit staged chunks once they fill a transaction."""
        self.blocks, self.tokens = chunk.end_block, chunk.end_token
        self._staged.append(chunk)
        self._staged_bytes += size
        if self._staged_bytes >= self._commit_bytes:
            self._submit()

    def _submit(self, *, final: bool = False) -> None:
        """Commit the staged whole chunks in the background, after the previous transaction; final:
        all chunks, and make the document ready. Raises what the previous transaction raised.
        """
        self._wait()
        chunks = [chunk for chunk in self._staged if chunk.whole or final]
        self._staged = self._staged[len(chunks) :]  # only the last chunk may be incomplete
        self._staged_bytes = 0
        if chunks or final:
            self._committing = self._thread.submit(self._commit, chunks, final)

    def _wait(self) -> None:
        """Wait until the submitted transaction is stored. Raises what committing raised, at every
        call: no chunk may follow one that was not stored.
        """
        if self._committing is not None:
            self._committing.result()

    def _commit(self, chunks: Sequence[Chunk], final: bool) -> None:
        """Commit chunks, on the background thread, then unpin them, except the latest blocks, which
        the ingest reads next.
        """
        self._commits.commit(chunks, final=final)
        latest = self._commits.keep_from(self.document.blocks)
        units = self._pinned + [unit for chunk in chunks for unit in chunk.units]
        self._pinned = [unit for unit in units if unit.block >= latest]
        if units:  # passages have none
            self._retrieval.tiers.drop([unit for unit in units if unit.block < latest])

    def finish(self) -> Document:
        """Commit the remaining chunks, make the document ready and delete the document that it
        replaces, in one transaction; return the document. Raises what committing raises.
        """
        self._submit(final=True)
        self._wait()
        self._finished = True
        self.close()
        return self._commits.row

    def close(self) -> None:
        """Commit the staged whole chunks, unless committing failed before, and release everything.
        Raises what committing raised. Called by `with`.
        """
        if self._closed:
            return
        self._closed = True
        failed: BaseException | None = None
        try:
            if not self._finished:
                self._submit()
            self._wait()
        except BaseException as error:
            failed = error
            raise
        finally:
            self._thread.shutdown(wait=True)
            self._let_go()
            try:
                if isinstance(failed, StorageFull):
                    self._commits.delete_empty()
            finally:
                self._on_close(self)

    def _let_go(self) -> None:
        """Unpin all blocks, and drop landmarks of layers without memory."""
        staged = [unit for chunk in self._staged for unit in chunk.units]
        pinned, stay = self._pinned + staged, self._memory_layers
        tiers, index = self._retrieval.tiers, self._retrieval.index
        if pinned:  # passages are not
            tiers.host.unpin([unit for unit in pinned if unit.layer in stay])
            tiers.drop([unit for unit in pinned if unit.layer not in stay])
        for layer in self._other_layers:
            index.trim(self.document.id, self.blocks, layer)


def _known(catalog: Catalog, txn: Transaction, digest: Digest, runs: Runs) -> Known | None:
    passage, spec = catalog.passages.find(txn, digest), catalog.runs.spec
    if passage is None:
        return None
    if spec is None or not spec.width:
        return Known(None, passage.bytes > 0)
    try:
        landmarks = _landmarks(catalog, txn, *passage.home, digest, runs)
    except CorruptMemory:  # ingest the passage again instead of copying damage
        return None
    return None if landmarks is None else Known(landmarks, passage.bytes > 0)


def _landmarks(
    catalog: Catalog, txn: Transaction, document: int, block: int, digest: Digest, runs: Runs
) -> np.ndarray | None:
    """The token landmarks of a passage that is this block; None if the block has changed."""
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


def _load_recent(
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
