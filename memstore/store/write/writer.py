"""Writing one document into a memory: chunks are staged, then encoded and committed in the
background, whole chunks at a time.

A staged chunk can be searched and read at once (pinned units, index rows); passages once they are
committed, since no passage is read for another one. After a kill at any instant, the memory holds a
prefix of whole chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from memstore.disk.format.block_words import Words
from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Passage
from memstore.disk.tables.catalog import Catalog
from memstore.errors import InvalidInput
from memstore.store.retrieve.retrieval import Retrieval
from memstore.store.stored_text import read_passages
from memstore.store.write import admission
from memstore.store.write.chunk import (
    Chunk,
    KeysValues,
    LayerBlocks,
    Position,
    check_batch,
    check_chunk,
)
from memstore.store.write.commits import Commits
from memstore.store.write.known_passages import Known, KnownPassages
from memstore.store.write.readable import Readable

COMMIT_BYTES = 16 << 20  # keys and values of memory layers in a transaction


class InStore(NamedTuple):
    """What a writer has of its store."""

    locks: ExitStack  # released at the end
    make_room: Callable[[], None]  # has the store's other writers let go of what they can
    on_close: Callable[["DocumentWriter"], None]


class DocumentWriter:
    """One document being read; a context manager. Use MemoryStore.write_document.

    Leaving without `finish` (an error, Ctrl-C) commits the whole chunks that were staged and leaves
    the document "ingesting", to be resumed. Tensors given to add_chunk belong to the writer
    afterwards: do not write to them. Of one thread; other documents may be written by others
    meanwhile.
    """

    def __init__(
        self,
        catalog: Catalog,
        retrieval: Retrieval,
        admitted: admission.Admission,
        in_store: InStore,
        commit_bytes: int | None = None,
    ) -> None:
        """Write the row of a document that may be written. Raises CorruptMemory, StorageFull."""
        document = admission.begin(catalog, admitted)
        last: list[Passage] = []
        with catalog.database.read() as txn:
            retrieval.load(txn, document)
            if document.of_passages:
                last = read_passages(catalog, txn, document, max(0, document.blocks - 1))
        self._catalog = catalog
        self._memory_layers = set(document.memory_layers(catalog.signature))
        geometry = catalog.signature.geometry
        self._readable = Readable(retrieval, document, self._memory_layers, geometry)
        self._commits = Commits(
            catalog,
            document,
            replaces=admitted.replaces,
            commit_bytes=COMMIT_BYTES if commit_bytes is None else commit_bytes,
            on_commit=self._committed,
        )
        # of a document of passages
        self._known = KnownPassages(catalog, document) if document.of_passages else None
        self._in_store = in_store
        self._blocks, self._tokens = document.blocks, document.tokens
        self._characters = last[0].end if last else 0
        self._ended = False  # by a chunk that is not whole
        self._finished = False
        self._closed = False

    @property
    def document(self) -> Document:
        """The document as committed so far."""
        return self._commits.row

    @property
    def blocks(self) -> int:
        """Blocks so far, staged ones included: the number of the next block."""
        return self._blocks

    @property
    def tokens(self) -> int:
        """Content tokens so far, staged ones included: continue reading from here."""
        return self._tokens

    @property
    def characters(self) -> int:
        """Of a document of passages, its characters up to the end of the last one so far, staged
        ones included: continue reading from here.
        """
        return self._characters

    def add_chunk(
        self,
        token_ids: Sequence[int] | np.ndarray,
        char_start: int,
        layers: Mapping[int, LayerBlocks],
        length_of_last: int | None = None,
    ) -> None:
        """Take the next chunk: chunk_blocks blocks, or fewer at the document's end.

        token_ids: content tokens of the chunk. char_start: characters of the document before its
        first token. layers: for every layer K, V [n, Hkv, block_size, D] (K rotated by the offset
        in the block) and landmark keys [n, Hkv, D]. length_of_last: content tokens of the last
        block where a document's end leaves it short.

        Waits when storage is far behind. Raises what committing raised (StorageFull, ...),
        BudgetExceeded, InvalidInput.
        """
        self._commits.check()
        if self._known is not None:
            raise InvalidInput("this document is made of passages; add those (add_passages)")
        if self._ended:
            raise InvalidInput(
                f"a chunk after the document's last, which ended at token {self._tokens}; only the "
                "last one is short"
            )
        ids = np.asarray(token_ids, dtype=np.int64)
        chunk = check_chunk(
            self._catalog, self.document, self._blocks, ids, char_start, layers, length_of_last
        )
        if not self._commits.encoder.lossless:  # it is read as it will be stored
            self._commits.encoder.replace_by_stored(chunk)
        # what is committed needs no pin
        self._readable.show(chunk, [self._flush, self._in_store.make_room])
        self._ended = not chunk.whole
        self._stage(chunk, sum(2 * layers[layer][0].nbytes for layer in self._memory_layers))

    def known(self, passages: Sequence[Passage]) -> list[Known | None]:
        """What is stored of passages that come, whatever document they are of; None of the others.
        Keys and values of a stored passage need not be given: if its documents are forgotten before
        this one is committed, they are computed when a question needs them.

        Raises InvalidInput for a document that is not made of passages, WrongModel, CorruptMemory.
        """
        if self._known is None:
            raise InvalidInput("this document is not made of passages; none is looked up")
        return self._known.look_up(passages)

    def add_passages(
        self,
        passages: Sequence[Passage],
        kv: Sequence[KeysValues],
        *,
        given: Sequence[int] | None = None,
        landmarks: Tensor | None = None,
        words: Sequence[Words] | None = None,
    ) -> None:
        """Take the next n passages, a block each; any n of at least 1.

        kv: of m of them K, V [tokens, width] in the KV dtype, which belong to the writer
        afterwards. given: which m of the n these are, in order (None: all of them); of the others
        no keys and values are stored, except those that are stored already (`known`). landmarks:
        int8 [tokens of all n, landmark width]; words: of each passage its distinct words (hash,
        count). The passages are found and read once the document is ready.

        Waits when storage is far behind. Raises what committing raised (StorageFull, ...),
        InvalidInput.
        """
        self._commits.check()
        if self._known is None:
            raise InvalidInput("this document is not made of passages; add chunks (add_chunk)")
        at = Position(self._blocks, self._tokens, self._characters)
        given = range(len(passages)) if given is None else given
        if len(kv) != len(given):
            raise InvalidInput(f"expected keys and values of {len(given)} passages, got {len(kv)}")
        of_given = dict(zip(given, kv))
        chunk = check_batch(self._catalog, self.document, at, passages, of_given, landmarks, words)
        self._characters = chunk.end
        self._stage(chunk, sum(k.nbytes + v.nbytes for k, v in kv))

    def recent_landmarks(self, layer: int, n: int) -> Tensor:
        """Landmark keys [n, Hkv, D] of the latest n blocks (fewer where there are fewer), staged or
        stored, as they are stored: a resumed ingest attends to them.

        Of a layer without memory there are top_k at most.
        """
        first = max(0, self._blocks - n)
        if layer not in self._memory_layers:
            first = max(first, self._commits.keep_from(self._blocks))
        return self._readable.landmarks(layer, range(first, self._blocks), self._commits.recent)

    def store_staged(self) -> None:
        """Commit every whole staged chunk, and wait until that is done or has failed; another
        thread that needs the room may call it.
        """
        self._commits.submit()
        self._commits.wait()

    def finish(self) -> Document:
        """Commit what is left, make the document ready (and, if it replaces one, take its place) in
        one transaction; return it. Raises what committing raises.
        """
        self._commits.check()
        self._commits.submit(final=True)
        self._commits.wait()
        self._commits.check()
        self._finished = True
        self.close()
        return self._commits.row

    def close(self) -> None:
        """Commit the staged whole chunks, unless committing failed before, and release everything.
        Called by `with`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._commits.close(finished=self._finished)
        finally:
            self._readable.close()
            try:
                self._in_store.on_close(self)
                self._commits.delete_empty()
            finally:
                self._in_store.locks.close()
        self._commits.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BaseException:
            if error is None:
                raise  # otherwise the block's own error is the one to see

    def _stage(self, chunk: Chunk, size: int) -> None:
        self._blocks, self._tokens = chunk.end_block, chunk.end_token
        self._commits.add(chunk, size)

    def _flush(self) -> None:
        self.store_staged()
        self._commits.check()

    def _committed(self, chunks: Sequence[Chunk]) -> None:
        """On the committing thread."""
        self._readable.committed(chunks, self._commits.keep_from(chunks[-1].end_block))
