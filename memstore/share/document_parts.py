"""The parts of a document in memories, exported files and publications (tokens, search data and
records, in this order): reading them from a memory's directory, and checking that they are
complete.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from memstore.block import RecordKey
from memstore.decode import Block, Count, Layer
from memstore.disk.format.document import Document, WriteId
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction, document_range, read_run_key, run_key
from memstore.disk.tables.block_table import BlockTable, is_finite
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import Coverage, IndexSpec, RunTable
from memstore.disk.tables.texts import (
    Digest,
    StoredPassage,
    decode_part,
    decode_tokens,
    digest_of,
    equal_lengths,
)
from memstore.errors import CorruptMemory, InvalidInput

_BATCH_BYTES = 8 << 20  # bytes of parts that are read in one transaction


class Tokens(NamedTuple):
    """A value of the table of tokens."""

    first: Count  # its first token or passage
    value: bytes


class IndexRun(NamedTuple):
    """A value of the table of search data."""

    part: Layer  # layer of landmark keys, or part of a selector's runs
    first_block: Block
    value: bytes


class Record(NamedTuple):
    """A record as on disk."""

    block: Block
    layer: Layer
    data: bytes


Part = Tokens | IndexRun | Record


class Head(NamedTuple):
    """A document's row, and the model and selector of its parts."""

    signature: Signature
    document: Document
    selector: IndexSpec | None


def check_parts(head: Head, parts: Iterable[Part]) -> tuple[int, int]:
    """Check that these parts are a complete document, in order; return the number and bytes of its
    records. Raises CorruptMemory.
    """
    records = size = 0
    try:
        for part in PartOrder(head).checked(parts):
            if isinstance(part, Record):
                records, size = records + 1, size + len(part.data)
    except ValueError as error:
        raise CorruptMemory(f"a part is missing, or of another document ({error})") from error
    return records, size


def usable_parts(head: Head, parts: Iterable[Part]) -> Iterator[Part]:
    """These parts, each checked before it is yielded: complete, in order, finite numbers, and
    tokens of the vocabulary. Raises ValueError, CorruptBlock.
    """
    order = PartOrder(head)
    for part in order.checked(parts):
        if isinstance(part, Record):
            order.blocks.check_numbers(part.data, *order.record_id(part.block, part.layer))
        yield part


class PartOrder:
    """Checks that parts are a complete document, in order: `add` each, then `end`; both raise
    ValueError if not.
    """

    def __init__(self, head: Head) -> None:
        signature, document, spec = head
        self._signature, self._runs = signature, RunTable(signature.geometry, spec)
        self._document, self._size = document, signature.block_size
        vocabulary = signature.architecture.get("vocab_size")
        self._vocabulary = vocabulary if isinstance(vocabulary, int) else 1 << 32
        self.blocks = BlockTable(signature, "raw")  # reads records of every codec
        self._lengths: np.ndarray | None = None  # tokens of each block, after the last tokens
        self._of_passages: list[int] = []  # tokens of each passage
        self.digests: list[Digest] = []  # digests of its passages, by block
        if document.of_passages:
            _expect(spec is not None, "passages need a selector")
        else:
            _expect(spec is None, "a selector needs passages")
            blocks_ = -(-document.tokens // self._size)
            _expect(document.blocks == blocks_, "its count of blocks is wrong")
        self._tokens = self._characters = 0
        self._first = document.first_blocks(signature)
        self._coverage: Coverage | None = None
        self._last = -1  # block of the latest record
        self._records = (  # expected records of a document of blocks
            (block, layer)
            for block in range(min(self._first.values(), default=0), document.blocks)
            for layer, first in self._first.items()
            if block >= first and not document.of_passages
        )

    def checked(self, parts: Iterable[Part]) -> Iterator[Part]:
        """These parts, each checked before it is yielded. Also raises CorruptBlock."""
        for part in parts:
            self.add(part)
            yield part
        self.end()

    def add(self, part: Part) -> None:
        """Check the next part. Also raises CorruptBlock."""
        if isinstance(part, Tokens):
            _expect(self._lengths is None, "tokens after landmarks")
            self._add_tokens(part)
            return
        lengths = self.lengths()
        if isinstance(part, IndexRun):
            assert self._coverage is not None
            number, first, value = part
            _expect(number in self._runs.parts(self._first), f"landmarks of a part {number}")
            run = self._runs.decode(number, first, value)
            self._coverage.add(number, run)
            finite = run.kind != "landmark" or is_finite(run.landmarks, self._signature.kv_dtype)
            _expect(finite, "it has landmark keys that are not finite")
        else:
            block, layer, data = part
            if not self._document.of_passages:
                right = next(self._records, None) == (block, layer)
            else:  # passages may lack records
                right = layer == 0 and self._last < block < self._document.blocks
            self._last = block
            what = f"a record before block {block}, layer {layer} is missing, or it is one too many"
            _expect(right, what)
            length = self.blocks.check(data, *self.record_id(block, layer))
            told = lengths[block]
            _expect(length == told, f"block {block} has {length} tokens instead of {told}")

    def record_id(self, block: int, layer: int) -> tuple[RecordKey, WriteId]:
        """The key and write id that a record of the document must have, after its tokens."""
        document = self._document
        if document.of_passages:
            return RecordKey(document.id, 0, layer), self.digests[block]
        return RecordKey(document.id, block, layer), document.write

    def _add_tokens(self, part: Tokens) -> None:
        if self._document.of_passages:
            found = decode_part(part.first, part.value, self._size)
            follows = (part.first, found.start) == (len(self.digests), self._characters)
            _expect(follows, f"passages before block {part.first} are missing, or extra")
            self._characters = found.end
            signature, codec = self.blocks.signature, self._document.codec
            for one in found.passages:
                self._check_vocabulary(one.ids)
                self._of_passages.append(len(one.ids))
                self.digests.append(digest_of(signature, codec, one.ids))
            return
        tokens = decode_tokens(part.first, part.value)
        self._check_vocabulary(tokens.ids)
        _expect(part.first == self._tokens, "tokens are missing")
        _expect(tokens.char_start >= self._characters, "its characters are not in order")
        self._tokens += len(tokens.ids)
        self._characters = tokens.char_start
        _expect(self._tokens <= self._document.tokens, "there are more tokens than its row says")

    def _check_vocabulary(self, ids: np.ndarray) -> None:
        _expect(
            ids.max() < self._vocabulary,
            f"it has tokens beyond the vocabulary of {self._vocabulary}",
        )

    def lengths(self) -> np.ndarray:
        """Tokens of each block, after the last part with tokens."""
        document = self._document
        if self._lengths is None:
            lengths = (
                np.array(self._of_passages, dtype=np.int64)
                if document.of_passages
                else equal_lengths(self._tokens, self._size)
            )
            whole = (len(lengths), lengths.sum()) == (document.blocks, document.tokens)
            _expect(whole, "it does not hold all of its tokens")
            self._lengths = lengths
            parts = self._runs.parts(self._first)
            self._coverage = Coverage(parts, self._first, self._lengths)
        return self._lengths

    def end(self) -> None:
        """Check that all parts were added."""
        self.lengths()
        if self._coverage is not None:
            self._coverage.end()
        _expect(next(self._records, None) is None, "it does not hold all of its records")


def _expect(right: object, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)


# From a memory's directory


def stored_parts(
    catalog: Catalog,
    document: Document,
    wants: Callable[[StoredPassage], bool] | None = lambda passage: True,
) -> Iterator[Part]:
    """Copies of a document's parts in order: tokens, search data, records.

    wants: is the record of this passage wanted; None: no records of passages. Each batch of parts
    has its own transaction, so that none stays open while the caller uploads. Raises InvalidInput
    (the document changed concurrently), CorruptMemory.
    """
    at: _At | None = _At(0, 0, 0)
    while at is not None:
        batch, size, last = list[Part](), 0, at
        with catalog.database.read() as txn:
            if catalog.row(txn, document.id) != document:
                raise InvalidInput(
                    f"document {document.name!r} changed while it was read; try again"
                )
            for now, part in _parts_from(txn, catalog, document, at, wants):
                if size >= _BATCH_BYTES and now != last:  # records of a block stay together
                    at = now
                    break
                batch.append(part)
                size, last = size + len(part[-1]), now
            else:
                at = None
        yield from batch


class _At(NamedTuple):
    """The position of a part in a document."""

    table: int  # 0: tokens, 1: search data, 2: records
    part: int  # part of search data
    first: int  # token, passage or block


def _parts_from(
    txn: Transaction,
    catalog: Catalog,
    document: Document,
    at: _At,
    wants: Callable[[StoredPassage], bool] | None,
) -> Iterator[tuple[_At, Part]]:
    """Parts from a position on, each with its position."""
    if at.table == 0:
        for first, value in catalog.texts.parts(txn, document.id, at.first):
            yield _At(0, 0, first), Tokens(first, value)
        at = _At(1, 0, 0)
    if at.table == 1:
        low, high = run_key(document.id, at.part, at.first), document_range(document.id)[1]
        for key, value in txn.scan_checked("landmarks", low, high):
            _, part, first = read_run_key(key)
            yield _At(1, part, first), IndexRun(part, first, value)
        at = _At(2, 0, 0)
    if not document.of_passages:
        for record, data in catalog.blocks.walk(txn, document.id, at.first):
            yield _At(2, 0, record.block), Record(record.block, record.layer, bytes(data))
    elif wants is not None:
        for block, passage in catalog.passages_of(txn, document, at.first):
            if passage.bytes and wants(passage):
                for record, data in catalog.blocks.walk(txn, passage.number):
                    yield _At(2, 0, block), Record(block, record.layer, bytes(data))
