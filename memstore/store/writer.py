"""Writing one document into a memory: chunks are staged at once, encoded on a worker thread, and
committed on another, whole chunks at a time: while the disk takes in one transaction, the next one
is encoded.

A staged chunk can be searched and read immediately (pinned units, index rows). Killed at any
instant, the memory holds what the last transaction held: a prefix of whole chunks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import dropwhile, product
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.catalog import Catalog, Document, State
from memstore.disk.codec import get_codec
from memstore.disk.database import Transaction
from memstore.errors import BudgetExceeded, CorruptMemory, InvalidInput
from memstore.index import LandmarkIndex
from memstore.tiers.cascade import Cascade
from memstore.tiers.raw_bits import from_raw, raw_view, torch_dtype

COMMIT_BYTES = 16 << 20  # keys and values of memory layers in a transaction
# blocks whose landmark keys share one value: few values to open, little to write again at a commit
LANDMARK_RUN = 256

LayerBlocks = tuple[Tensor, Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype.
"""


class TokenSpan(NamedTuple):
    """A run of a document's tokens, with what is needed to find its characters.

    The first token of `ids` begins char_start + (length of the text of `before`) characters into
    the document.
    """

    ids: np.ndarray  # int64 [n]
    before: np.ndarray  # int64 [m], the tokens between char_start and the first of `ids`
    char_start: int


def read_tokens(
    catalog: Catalog, txn: Transaction, document: Document, first: int, end: int | None = None
) -> TokenSpan:
    """Content tokens `first` to `end` (exclusive; None: all) of a document, fewer at its end.
    Raises CorruptMemory.
    """
    end = document.tokens if end is None else min(end, document.tokens)
    parts = list(
        catalog.token_parts(txn, document.id, max(0, first - 1), end)
    )  # also where `first` is the document's end
    if len(parts) > 1 and parts[1].first <= first:
        del parts[0]
    # Each part is under a checksum; that none is missing or twice there must be seen here.
    after = 0 if not parts else parts[0].first
    whole = after <= first
    for part in parts:
        whole = whole and part.first == after
        after = part.first + len(part.ids)
    if not whole or after < end:
        raise CorruptMemory(
            f"tokens of document {document.name!r} in {catalog.database.path} are missing; run "
            "verify"
        )
    if not parts:
        return TokenSpan(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
    start = parts[0].first
    ids = np.concatenate([part.ids for part in parts])
    return TokenSpan(
        ids[first - start : max(0, end - start)], ids[: first - start], parts[0].char_start
    )


class RecentBlocks(NamedTuple):
    """The latest blocks of a document in one layer, as they are stored."""

    k: Tensor  # [n, Hkv, block_size, D]
    v: Tensor  # [n, Hkv, block_size, D]
    landmarks: Tensor  # [n, Hkv, D]
    blocks: range


@dataclass(eq=False)
class _Chunk:
    """A staged chunk on its way to disk."""

    first_block: int
    end_block: int
    first_token: int
    char_start: int
    ids: np.ndarray
    last_length: int
    whole: bool
    # layer -> K, V; a memory layer's until they are encoded
    blocks: dict[int, tuple[Tensor, Tensor]]
    landmarks: dict[int, Tensor]
    units: list[BlockKey] = field(default_factory=list)
    # (block, layer) -> record, once encoded
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)
    encoding: Future[None] | None = None  # until it is done, blocks and records are the encoder's

    @property
    def boundary(self) -> int:
        """The last boundary of chunks, in blocks, once this chunk is there."""
        return self.end_block if self.whole else self.first_block


class DocumentWriter:
    """One document being read; a context manager. Use MemoryStore.write_document.

    Leaving without `finish` (an error, Ctrl-C) commits the whole chunks that were staged and leaves
    the document "ingesting", to be resumed. Tensors given to add_chunk belong to the writer
    afterwards: do not write to them.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Cascade,
        index: LandmarkIndex,
        document: Document,
        *,
        blocks: int,
        replaces: Document | None,
        commit_bytes: int,
        locks: ExitStack,
        on_close: Callable[["DocumentWriter"], None],
    ) -> None:
        """document: its row as it is committed; blocks: how many of its blocks stay (fewer than the
        row's where it is appended to).
        """
        signature = catalog.signature
        self._catalog, self._tiers, self._index = catalog, tiers, index
        self._block_size, self._heads, self._dim = (
            signature.block_size,
            signature.num_kv_heads,
            signature.head_dim,
        )
        self._dtype = torch_dtype(signature.kv_dtype)
        self._lossless = get_codec(catalog.codec).lossless
        self._layers = document.layers_of(signature)
        self._memory_layers = sorted({*signature.memory_layers} & {*self._layers})
        self._other_layers = sorted(set(self._layers) - set(self._memory_layers))
        self._chunk_blocks = document.settings.chunk_blocks
        self._top_k = document.settings.top_k
        # of a document that is appended to, which answers until the first commit
        self._unfinished: State = "ingesting" if document.state == "ready" else document.state
        if document.state == "ready" or document.write_of(blocks) is None:
            document = document.begin_write(blocks)
        self._committed = document
        self._cut = blocks < document.blocks  # blocks from here on are replaced by the first commit
        self._base = blocks
        self._replaces = replaces
        self._commit_bytes = commit_bytes
        self._locks, self._on_close = locks, on_close
        self._blocks, self._tokens = blocks, blocks * signature.block_size
        self._boundary = blocks  # of chunks, from where an append would continue
        self._ended = False  # by a chunk that is not whole
        self._finished = False
        self._keep = self._keep_from(blocks)  # first block that is stored of layers without memory
        self._landmarks: dict[int, list[tuple[int, Tensor]]] = {layer: [] for layer in self._layers}
        self._staged: list[_Chunk] = []  # not yet given to a commit
        self._staged_bytes = 0
        self._pinned: list[BlockKey] = []  # committed, but still among the latest blocks
        # those that may not be done, and their bytes
        self._commits: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        self._load_landmarks()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="memstore-encoder")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="memstore-writer")

    @property
    def document(self) -> Document:
        """The document as committed so far; where it is appended to, before the first commit,
        without what will be replaced.
        """
        if self._cut:
            return replace(self._committed, blocks=self._base, tokens=self._base * self._block_size)
        return self._committed

    @property
    def blocks(self) -> int:
        """Blocks so far, staged ones included: the number of the next block."""
        return self._blocks

    @property
    def tokens(self) -> int:
        """Content tokens so far, staged ones included: continue reading from here."""
        return self._tokens

    @property
    def base_tokens(self) -> int:
        """Tokens that the document had before it was appended to; 0 otherwise."""
        return self._committed.appended_to

    def replaced_tokens(self) -> TokenSpan:
        """Stored tokens behind `tokens`, and where their characters begin: to be read again with
        what is appended.

        There are none but in an append that has not committed yet, where the document ended within
        a chunk; where the characters begin is told even so.
        """
        with self._catalog.database.read() as txn:
            return read_tokens(self._catalog, txn, self._committed, self._tokens)

    # Staging

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
        self._check()
        chunk = self._chunk(
            np.asarray(token_ids, dtype=np.int64), char_start, layers, length_of_last
        )
        if not self._cut:
            self._show(chunk)
        self._remember_landmarks(chunk)
        self._staged.append(chunk)
        self._blocks, self._tokens, self._ended = (
            chunk.end_block,
            chunk.first_token + len(chunk.ids),
            not chunk.whole,
        )
        self._boundary = chunk.boundary
        if chunk.whole and self._cut:
            # Old blocks have the numbers of the new ones: they are answered from until the new ones
            # are committed.
            self._flush()
            self._add_to_index(chunk)
        elif chunk.whole:
            self._staged_bytes += sum(2 * layers[layer][0].nbytes for layer in self._memory_layers)
            chunk.encoding = self._encoder.submit(self._encode_ahead, chunk)
            if self._staged_bytes >= self._commit_bytes:
                self._submit_commit()
        while self._waiting_bytes > 2 * self._commit_bytes:
            self._wait_for_one()
        self._check()

    def recent(self, layer: int, n: int) -> RecentBlocks:
        """The latest n blocks (fewer where there are fewer), staged or stored, as they are stored:
        what a resumed ingest attends to.

        Of a layer without memory there are no more than top_k. Raises CorruptBlock.
        """
        first = max(0, self._blocks - n)
        if layer in self._other_layers:
            first = max(first, self._keep_from(self._boundary))
        blocks = range(first, self._blocks)
        units = [
            BlockKey(self._committed.id, layer, block, head)
            for block, head in product(blocks, range(self._heads))
        ]
        shape = (len(blocks), self._heads, self._block_size, self._dim)
        with self._tiers.lease(units) as lease:
            k, v = (half.index_select(0, lease.slots).view(shape) for half in (lease.k, lease.v))
        if layer in self._other_layers:
            landmarks = self._landmark_rows(layer, first, self._blocks)
        else:
            landmarks = (
                self._index.keys(layer, [(self._committed.id, first, self._blocks)])
                .transpose(0, 1)
                .to(self._dtype)
            )
        return RecentBlocks(k, v, landmarks, blocks)

    def finish(self) -> Document:
        """Commit what is left, make the document ready (and, if it replaces one, take its place) in
        one transaction; return it.
        """
        self._check()
        # an appended end that replaces old blocks
        unseen = [chunk for chunk in self._staged if not chunk.units]
        self._submit_commit(final=True)
        while self._commits:
            self._wait_for_one()
        self._check()
        for chunk in unseen:
            self._add_to_index(chunk)
        self._finished = True
        self.close()
        return self._committed

    def close(self) -> None:
        """Commit the staged whole chunks, unless committing failed before, and release everything.
        Called by `with`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._finished:
                self._staged = [chunk for chunk in self._staged if chunk.whole]
                if self._staged and self._error is None:
                    self._submit_commit()
            self._encoder.shutdown(wait=True)
            self._worker.shutdown(wait=True)
        finally:
            memory = set(self._memory_layers)
            self._tiers.unpin([unit for unit in self._pinned if unit.layer in memory])
            self._tiers.drop([unit for unit in self._pinned if unit.layer not in memory])
            try:
                self._on_close(self)
            finally:
                self._locks.close()
        self._check()

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

    def _chunk(
        self,
        ids: np.ndarray,
        char_start: int,
        layers: Mapping[int, LayerBlocks],
        length_of_last: int | None,
    ) -> _Chunk:
        if set(layers) != set(self._layers):
            raise InvalidInput(
                f"a chunk needs blocks of layers {self._layers}, not of {sorted(layers)}"
            )
        n = layers[0][0].shape[0]
        last = self._block_size if length_of_last is None else length_of_last
        blocks, keys = (n, self._heads, self._block_size, self._dim), (n, self._heads, self._dim)
        for layer, (k, v, landmarks) in layers.items():
            shapes = (tuple(k.shape), tuple(v.shape), tuple(landmarks.shape))
            if shapes != (blocks, blocks, keys) or {k.dtype, v.dtype, landmarks.dtype} != {
                self._dtype
            }:
                raise InvalidInput(
                    f"layer {layer}: expected {blocks}, {blocks}, {keys} {self._dtype}, got "
                    f"{shapes} {k.dtype}"
                )
        if not (
            1 <= n <= self._chunk_blocks
            and 1 <= last <= self._block_size
            and len(ids) == (n - 1) * self._block_size + last
        ):
            raise InvalidInput(
                f"{len(ids)} tokens in {n} blocks, the last of {last}, are no chunk of "
                f"{self._chunk_blocks} blocks"
            )
        if self._ended or self._blocks % self._chunk_blocks:
            raise InvalidInput(
                f"a chunk after the document's last, which ended at token {self._tokens}; append "
                "to it instead"
            )
        return _Chunk(
            first_block=self._blocks,
            end_block=self._blocks + n,
            first_token=self._tokens,
            char_start=char_start,
            ids=ids,
            last_length=last,
            whole=n == self._chunk_blocks and last == self._block_size,
            blocks={layer: (k, v) for layer, (k, v, _) in layers.items()},
            landmarks={layer: landmarks.clone() for layer, (_, _, landmarks) in layers.items()},
        )

    def _show(self, chunk: _Chunk) -> None:
        """Make the chunk's blocks readable, as they will be stored, and its landmarks
        searchable.
        """
        if not self._lossless:
            self._replace_by_stored(chunk)
        short = chunk.last_length if chunk.last_length < self._block_size else None
        try:
            chunk.units = self._pin(chunk, short)
        except BudgetExceeded:
            if not self._staged and not self._commits:
                raise
            self._flush()  # what is committed needs no pin
            chunk.units = self._pin(chunk, short)
        self._add_to_index(chunk)

    def _add_to_index(self, chunk: _Chunk) -> None:
        for layer in self._memory_layers:
            self._index.add(self._committed.id, layer, chunk.first_block, chunk.landmarks[layer])

    def _pin(self, chunk: _Chunk, short: int | None) -> list[BlockKey]:
        units: list[BlockKey] = []
        try:
            for layer, (k, v) in chunk.blocks.items():
                units += self._tiers.pin(self._committed.id, layer, chunk.first_block, k, v, short)
        except BudgetExceeded:
            self._tiers.drop(units)
            raise
        return units

    def _retire(self, chunks: Sequence[_Chunk]) -> None:
        """Committed units need no pin, but the latest top_k blocks are about to be read and stay
        until newer ones are committed.
        """
        units = self._pinned + [unit for chunk in chunks for unit in chunk.units]
        latest = self._keep_from(chunks[-1].boundary)
        self._pinned = [unit for unit in units if unit.block >= latest]
        done = [unit for unit in units if unit.block < latest]
        memory = set(self._memory_layers) if self._committed.settings.retrieve else set()
        # An ingest that attends to its latest blocks alone will not ask for the others: they make
        # room for those that are asked for.
        self._tiers.unpin([unit for unit in done if unit.layer in memory])
        self._tiers.drop([unit for unit in done if unit.layer not in memory])

    def _keep_from(self, boundary: int) -> int:
        """First block that must be at hand to continue from a boundary of chunks."""
        return max(0, boundary - self._top_k)

    # The workers: one thread to encode and one to commit, so that either keeps its order

    def _submit_commit(self, *, final: bool = False) -> None:
        """Commit what is staged, when it is encoded and what was submitted before it is
        committed.
        """
        chunks, size = self._staged, self._staged_bytes
        self._staged, self._staged_bytes = [], 0
        self._waiting_bytes += size
        self._commits.append((self._worker.submit(self._run, self._commit, chunks, final), size))

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        if self._error is not None:
            return  # nothing may follow what was not stored
        try:
            job(*arguments)
        except BaseException as error:
            self._error = error
            raise

    def _wait_for_one(self) -> None:
        future, size = self._commits[0]
        future.exception()  # waits; the error itself is in self._error
        self._commits.popleft()
        self._waiting_bytes -= size

    def _flush(self) -> None:
        """Commit every whole staged chunk, and wait for it."""
        if self._staged:
            self._submit_commit()
        while self._commits:
            self._wait_for_one()
        self._check()

    def _check(self) -> None:
        while self._commits and self._commits[0][0].done():
            self._wait_for_one()
        if self._error is not None:
            raise self._error

    def _encode_ahead(self, chunk: _Chunk) -> None:
        if self._error is None:
            self._encode(chunk)

    def _encode(self, chunk: _Chunk) -> None:
        layers = [layer for layer in self._memory_layers if layer in chunk.blocks]
        self._add_records(chunk, layers, chunk.first_block)
        for layer in layers:
            del chunk.blocks[layer]  # the records stand for them now

    def _add_records(self, chunk: _Chunk, layers: Iterable[int], first: int) -> None:
        """Encode the chunk's blocks from `first` on where that has not been done."""
        first = max(first, chunk.first_block)
        for layer in layers:
            if first < chunk.end_block and (chunk.end_block - 1, layer) not in chunk.records:
                k, v = (raw_view(x[first - chunk.first_block :]) for x in chunk.blocks[layer])
                key = RecordKey(self._committed.id, first, layer)
                write = self._committed.writes[-1].id
                records = self._catalog.blocks.encode(key, k, v, chunk.last_length, write)
                chunk.records.update(
                    ((block, layer), record) for block, record in enumerate(records, first)
                )

    def _replace_by_stored(self, chunk: _Chunk) -> None:
        """Have the chunk hold what reading its records will give: a resumed ingest would read just
        that.
        """
        self._add_records(chunk, self._layers, chunk.first_block)
        document, dtype = self._committed, self._catalog.signature.kv_dtype
        for layer in self._layers:
            stored = [
                self._catalog.blocks.decode(
                    chunk.records[block, layer],
                    RecordKey(document.id, block, layer),
                    document.write_of(block),
                )
                for block in range(chunk.first_block, chunk.end_block)
            ]
            chunk.blocks[layer] = (
                from_raw(np.stack([k for k, _, _ in stored]), dtype),
                from_raw(np.stack([v for _, v, _ in stored]), dtype),
            )

    def _commit(self, chunks: Sequence[_Chunk], final: bool) -> None:
        end = chunks[-1].end_block if chunks else self._committed.blocks
        keep = max(self._keep, self._keep_from(chunks[-1].boundary)) if chunks else self._keep
        records: list[tuple[int, int, bytes]] = []
        for chunk in chunks:
            if chunk.encoding is not None:
                # or its error, which is this commit's: what comes before it is stored
                chunk.encoding.result()
            self._encode(chunk)
            self._add_records(chunk, self._other_layers, keep)
            records += [
                (block, layer, record)
                for (block, layer), record in chunk.records.items()
                if block >= keep or layer not in self._other_layers
            ]
        records.sort(key=lambda record: record[:2])
        changed = self._cut and bool(chunks)
        runs = list(self._landmark_runs(chunks, keep)) if chunks else []

        def work(txn: Transaction) -> Document:
            row = self._committed
            number = row.id
            size = row.bytes
            if changed:
                size -= self._catalog.truncate_document(
                    txn, number, blocks=self._base, tokens=self._base * self._block_size
                )
            size -= self._catalog.blocks.delete_layers(
                txn, number, self._other_layers, self._keep, keep
            )
            for block, layer, record in records:
                size += self._catalog.blocks.put(txn, RecordKey(number, block, layer), record)
            for layer in self._other_layers:
                for first in range(_run_of(self._keep), _run_of(keep), LANDMARK_RUN):
                    self._catalog.delete_landmarks(txn, number, layer, first)
            for layer, first, keys in runs:
                self._catalog.put_landmarks(txn, number, layer, first, raw_view(keys))
            for chunk in chunks:
                self._catalog.put_tokens(
                    txn, number, chunk.first_token, chunk.char_start, chunk.ids
                )
            tokens = chunks[-1].first_token + len(chunks[-1].ids) if chunks else row.tokens
            row = replace(
                row,
                blocks=end,
                tokens=tokens,
                bytes=size,
                state="ready" if final else self._unfinished,
            )
            if final and self._replaces is not None:
                self._catalog.delete_document(txn, self._replaces.id)
            self._catalog.put_document(txn, row)
            return row

        self._committed = self._catalog.database.write(
            work, beyond_limit=final and self._replaces is not None
        )
        self._keep = keep
        if changed:
            self._index.truncate(self._committed.id, self._base)
            self._tiers.drop_document(self._committed.id, self._base)
        elif chunks:
            self._retire(chunks)
        self._cut = False

    # Landmark keys, written in runs on a fixed grid so that what is stored does not depend on when
    # it was committed

    def _load_landmarks(self) -> None:
        """Of a document that is continued: the keys the next commit writes again, and those of the
        latest blocks.
        """
        if not self._blocks:
            return
        first = min(_run_of(self._blocks), self._keep)
        with self._catalog.database.read() as txn:
            for run in self._catalog.landmarks(txn, self._committed.id):
                keys = from_raw(run.keys, self._catalog.signature.kv_dtype)
                keys = keys[: self._blocks - run.first_block]
                if run.first_block + len(keys) > first and len(keys):
                    self._landmarks[run.layer].append((run.first_block, keys))
        for layer in self._layers:
            oldest = first if layer in self._memory_layers else self._keep
            if len(self._landmark_rows(layer, oldest, self._blocks)) != self._blocks - oldest:
                raise CorruptMemory(
                    f"landmark keys of document {self._committed.name!r}, layer {layer} are "
                    "missing; run verify"
                )

    def _remember_landmarks(self, chunk: _Chunk) -> None:
        done = self.document.blocks
        first = min(_run_of(done), self._keep_from(done))
        for layer, keys in chunk.landmarks.items():
            # A new list: the worker may be reading the old one.
            kept = dropwhile(
                lambda piece: piece[0] + len(piece[1]) <= first, self._landmarks[layer]
            )
            self._landmarks[layer] = [*kept, (chunk.first_block, keys)]

    def _landmark_rows(self, layer: int, first: int, end: int) -> Tensor:
        """Remembered keys of blocks first .. end, [n, Hkv, D]."""
        rows = [torch.empty(0, self._heads, self._dim, dtype=self._dtype)]
        rows += [keys[max(0, first - at) : max(0, end - at)] for at, keys in self._landmarks[layer]]
        return torch.cat(rows)

    def _landmark_runs(
        self, chunks: Sequence[_Chunk], keep: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """What a commit of these chunks writes: (layer, first block, keys)."""
        end = chunks[-1].end_block
        for layer in self._layers:
            oldest = (
                chunks[0].first_block
                if layer in self._memory_layers
                else max(chunks[0].first_block, keep)
            )
            for first in range(_run_of(oldest), end, LANDMARK_RUN):
                yield (
                    layer,
                    first,
                    self._landmark_rows(layer, first, min(first + LANDMARK_RUN, end)),
                )


def _run_of(block: int) -> int:
    """First block of the run that a block's landmark key is stored in."""
    return block // LANDMARK_RUN * LANDMARK_RUN
