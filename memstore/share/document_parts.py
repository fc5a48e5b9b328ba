"""The parts of a document, as memories, exported files and publications hold them: tokens,
landmarks and records, in this order; and the check that parts are those of a complete document.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from memstore.block import RecordKey
from memstore.decode import Block, Count, Layer
from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.record import WriteId
from memstore.disk.format.runs import Coverage
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import PassageOrder, decode_part, decode_tokens, equal_lengths
from memstore.disk.tables.block_table import BlockTable, is_finite
from memstore.disk.tables.passage_table import Digest, digest_of
from memstore.disk.tables.run_table import RunTable
from memstore.errors import CorruptMemory


class Tokens(NamedTuple):
    """A value of the table of tokens."""

    first: Count  # token, or passage, that it begins with
    value: bytes


class IndexRun(NamedTuple):
    """A value of the table of landmarks."""

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
    """A document's row, and the model and selector that its parts are of."""

    signature: Signature
    document: Document
    selector: IndexSpec | None


def check_parts(head: Head, parts: Iterable[Part]) -> tuple[int, int]:
    """Check that these are the parts of a complete document, in order; return the number of its
    records and their bytes. Raises CorruptMemory.
    """
    records = size = 0
    try:
        for part in PartOrder(head).checked(parts):
            if isinstance(part, Record):
                records, size = records + 1, size + len(part.data)
    except ValueError as error:
        raise CorruptMemory(f"a part of it is missing, or another's ({error})") from error
    return records, size


def usable_parts(head: Head, parts: Iterable[Part]) -> Iterator[Part]:
    """These parts, each checked so that a memory can use it: complete, in order, with finite
    numbers, and tokens of the vocabulary. Raises ValueError, CorruptBlock.
    """
    vocabulary = head.signature.architecture.get("vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else 1 << 32
    order = PartOrder(head)
    for part in order.checked(parts):
        if isinstance(part, Tokens):
            if _largest_token(part, head) >= most:
                raise ValueError(f"it has tokens beyond the vocabulary of {most}")
        elif isinstance(part, Record):
            order.blocks.check_numbers(part.data, *order.record_id(part.block, part.layer))
        yield part


def _largest_token(part: Tokens, head: Head) -> int:
    first, value = part
    if not head.document.of_passages:
        return int(decode_tokens(first, value).ids.max())
    passages = decode_part(first, value, head.signature.block_size).passages
    return max(int(passage.ids.max()) for passage in passages)


class PartOrder:
    """Checks that parts are those of a complete document, in order: `add` each, then `end`. Both
    raise ValueError where they are not.
    """

    def __init__(self, head: Head, *, unfinished: bool = False) -> None:
        """unfinished: a document that is still being read in may be whole as far as it goes."""
        signature, document, spec = head
        self._signature, self._runs = signature, RunTable(signature.geometry, spec)
        self._document, self._size = document, signature.block_size
        self.blocks = BlockTable(signature, "raw")  # reads records of every codec
        ready = document.state == "ready" or unfinished
        _expect(ready and document.id > 0, "it is not ready")
        self._lengths: np.ndarray | None = None  # of its blocks, once all of its tokens are there
        self._passages: PassageOrder | None = None
        self.digests: list[Digest] = []  # of its passages, by block
        if document.of_passages:
            _expect(spec is not None, "passages are found by a selector")
            self._passages = PassageOrder()
        else:
            _expect(spec is None, "a selector finds passages")
            blocks_ = -(-document.tokens // self._size)
            _expect(document.blocks == blocks_, "its blocks are not counted")
        self._tokens = self._characters = 0
        self._first = document.first_blocks(signature)
        self._coverage: Coverage | None = None
        self._last = -1  # block of the latest record
        self._records = (  # that have to come, of a document of blocks
            (block, layer)
            for block in range(min(self._first.values(), default=0), document.blocks)
            for layer, first in self._first.items()
            if block >= first and not document.of_passages
        )

    def checked(self, parts: Iterable[Part]) -> Iterator[Part]:
        """All parts of a document, each checked before it is returned. Raises CorruptBlock too."""
        for part in parts:
            self.add(part)
            yield part
        self.end()

    def add(self, part: Part) -> None:
        """The next part. Raises CorruptBlock too."""
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
            if self._passages is None:
                right = next(self._records, None) == (block, layer)
            else:  # any may lack its record
                right = layer == 0 and self._last < block < self._document.blocks
            self._last = block
            what = f"a record before block {block}, layer {layer} is missing, or it is one too many"
            _expect(right, what)
            length = self.blocks.check(data, *self.record_id(block, layer))
            told = lengths[block]
            _expect(length == told, f"block {block} has {length} tokens instead of {told}")

    def record_id(self, block: int, layer: int) -> tuple[RecordKey, WriteId]:
        """The key and the write that a record of the document names, once all tokens were added."""
        document = self._document
        if self._passages is not None:
            return RecordKey(document.id, 0, layer), self.digests[block]
        return RecordKey(document.id, block, layer), document.write

    def _add_tokens(self, part: Tokens) -> None:
        if self._passages is not None:
            found = decode_part(part.first, part.value, self._size)
            self._passages.add(found)
            signature, codec = self.blocks.form.signature, self._document.codec
            self.digests += [digest_of(signature, codec, one.ids) for one in found.passages]
            return
        tokens = decode_tokens(part.first, part.value)
        _expect(part.first == self._tokens, "tokens are missing")
        _expect(tokens.char_start >= self._characters, "its characters are not in order")
        self._tokens += len(tokens.ids)
        self._characters = tokens.char_start
        _expect(self._tokens <= self._document.tokens, "there are more tokens than its row says")

    def lengths(self) -> np.ndarray:
        """Tokens of each block, once all parts with tokens are there."""
        document = self._document
        if self._lengths is None:
            if self._passages is None:
                _expect(self._tokens == document.tokens, "it does not hold all of its tokens")
                self._lengths = equal_lengths(document.tokens, self._size)
            else:
                self._passages.end(document.blocks, document.tokens)
                self._lengths = np.array(self._passages.lengths, dtype=np.int64)
            self._coverage = Coverage(self._runs.covered(self._first), self._lengths)
        return self._lengths

    def end(self) -> None:
        """Nothing follows."""
        self.lengths()
        if self._coverage is not None:
            self._coverage.end()
        _expect(next(self._records, None) is None, "it does not hold all of its records")


def _expect(right: object, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)
