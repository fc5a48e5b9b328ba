"""The text of a memory's documents, in parts of tokens or of passages; and each passage by its
content, which is stored once, whatever documents hold it.

Where blocks are of equal size, a value of the table of tokens holds characters of the document
before a part (u64), then its ids (u32), little-endian. Of a document that is made of passages it
holds consecutive passages, as they were given to a writer; in msgpack: characters of the document
before it, of each passage its gap, lead, length and characters (columns), and all their ids (u32,
little-endian).

A passage is known by its digest, of all that its keys and values follow from: the memory's
signature, the codec of its record and its tokens, those of the context in front included. Table
`digests` has the number of each digest; table `passages` has of each number the digest, the
references, the bytes of its record (0: none is stored), and the document and block that referred to
it last. A record follows from the tokens, so it may be missing.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from memstore.block import RecordKey
from memstore.decode import Block, Count, Packed, unpack
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import (
    Transaction,
    document_range,
    number_key,
    read_number_key,
    read_tokens_key,
    tokens_key,
)
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptMemory, InvalidInput

# Parts, and their values


class TokenPart(NamedTuple):
    """A run of a document's tokens as it was committed."""

    first: int  # number of the part's first token in the document
    char_start: int  # characters of the document before that token
    ids: np.ndarray  # int64 [n]


def encode_tokens(char_start: int, ids: Sequence[int] | np.ndarray) -> bytes:
    """The value of a part. char_start: characters of the document before its first token. ids:
    content tokens (no landmarks), each below 2**32.
    """
    return char_start.to_bytes(8, "little") + np.asarray(ids, dtype="<u4").tobytes()


def decode_tokens(first: int, value: bytes) -> TokenPart:
    """The tokens of a value. Raises ValueError for what is none."""
    if len(value) < 12 or len(value) % 4:
        raise ValueError(f"{len(value)} bytes are an impossible length")
    ids = np.frombuffer(value, dtype="<u4", offset=8).astype(np.int64)
    return TokenPart(first, int.from_bytes(value[:8], "little"), ids)


def equal_lengths(tokens: int, block_size: int) -> np.ndarray:
    """Tokens of each block, int64 [blocks], where blocks are full but for the last."""
    blocks = -(-tokens // block_size)
    lengths = np.full(blocks, block_size, dtype=np.int64)
    if blocks:
        lengths[-1] = tokens - (blocks - 1) * block_size
    return lengths


Keep = Literal["kv", "text"]
"""What is kept of passages: all, or no keys and values, which are computed when they are needed."""


class Passage(NamedTuple):
    """One block of a document that is made of passages."""

    ids: np.ndarray  # int64 [n], the lead's and its own
    lead: int  # of these, tokens of context in front, whose text belongs elsewhere
    gap: str  # text between the end of the passage before, or the beginning, and its own text
    start: int  # characters of the document before its own text
    characters: int  # of its own text

    @property
    def end(self) -> int:
        """Characters of the document before what follows its own text."""
        return self.start + self.characters


class PassagePart(NamedTuple):
    """Consecutive passages of a document as they were committed."""

    first_block: int
    start: int  # characters of the document before it
    passages: list[Passage]

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.passages)

    @property
    def end(self) -> int:
        """Characters of the document before what follows it."""
        return self.passages[-1].end


class _Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    start: Count
    gaps: list[str]
    leads: list[Count]
    lengths: list[Count]
    characters: list[Count]
    ids: bytes


def encode_part(start: int, passages: Sequence[Passage]) -> bytes:
    """The value of passages, the first of which has its gap at character `start` of the
    document.
    """
    value = [
        start,
        [passage.gap for passage in passages],
        [passage.lead for passage in passages],
        [len(passage.ids) for passage in passages],
        [passage.characters for passage in passages],
        b"".join(np.asarray(passage.ids).astype("<u4").tobytes() for passage in passages),
    ]
    packed: bytes = msgpack.packb(value)
    return packed


def decode_part(first_block: int, value: Packed, block_size: int) -> PassagePart:
    """The passages of a value. Raises ValueError for what is none."""
    part = unpack(value, _Part)
    count = len(part.gaps)
    if not len(part.leads) == len(part.lengths) == len(part.characters) == count:
        raise ValueError("its passages are not counted")
    if not count:
        raise ValueError("it has no passages")
    if not all(lead < length <= block_size for lead, length in zip(part.leads, part.lengths)):
        raise ValueError(f"a passage has no tokens of its own, or more than {block_size}")
    ends = list(accumulate(part.lengths, initial=0))
    if len(part.ids) != 4 * ends[-1]:
        raise ValueError(f"it has {len(part.ids)} bytes of tokens instead of {4 * ends[-1]}")
    ids = np.frombuffer(part.ids, "<u4").astype(np.int64)
    at, passages = part.start, []
    for number, gap in enumerate(part.gaps):
        at += len(gap)
        own = ids[ends[number] : ends[number + 1]]
        passages.append(Passage(own, part.leads[number], gap, at, part.characters[number]))
        at += part.characters[number]
    return PassagePart(first_block, part.start, passages)


class PassageOrder:
    """Do parts follow each other, each from where the last ended? `add` and `end` raise ValueError
    where they do not.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []  # tokens of each passage so far
        self._end = 0  # characters

    def add(self, part: PassagePart) -> None:
        """The next part."""
        if part.first_block != len(self.lengths) or part.start != self._end:
            raise ValueError(f"passages before block {part.first_block} are missing, or extra")
        self.lengths += [len(passage.ids) for passage in part.passages]
        self._end = part.end

    def end(self, blocks: int, tokens: int) -> None:
        """Nothing follows; blocks, tokens: of the document."""
        if (len(self.lengths), sum(self.lengths)) != (blocks, tokens):
            raise ValueError(
                f"its passages are {len(self.lengths)} of {sum(self.lengths)} tokens instead of "
                f"{blocks} of {tokens}"
            )


# The table of tokens


class TokenSpan(NamedTuple):
    """A run of a document's tokens, with what is needed to find its characters.

    The first token of `ids` begins char_start + (length of the text of `before`) characters into
    the document.
    """

    ids: np.ndarray  # int64 [n]
    before: np.ndarray  # int64 [m], the tokens between char_start and the first of `ids`
    char_start: int


class TextTable:
    """The text of one memory's documents. Every method takes the transaction it works in."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def put_part(self, txn: Transaction, document: int, number: int, value: bytes) -> None:
        """Write a part of a document's tokens, as encode_tokens or encode_part made it; number: of
        the token, or of the passage, that it begins with.
        """
        txn.put_checked("tokens", tokens_key(document, number), value)

    def parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The parts of a document's tokens from the one on that holds number `first`, to before
        number `end` (None for all), in order: the number that each begins with, and its value.

        The iterator lives in the transaction.
        """
        low, high = document_range(document)
        if end is not None:
            high = tokens_key(document, end)
        start = txn.key_at_or_before("tokens", tokens_key(document, first))
        if start is None or start < low:
            start = low
        for key, value in txn.scan_checked("tokens", start, high):
            yield read_tokens_key(key)[1], value

    def token_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[TokenPart]:
        """The parts that hold tokens `first` to `end` (exclusive; None for all), in order, each
        whole. Raises CorruptMemory.

        The iterator lives in the transaction.
        """
        for number, value in self.parts(txn, document, first, end):
            with _named(document):
                part = decode_tokens(number, value)
            if number + len(part.ids) > first:
                yield part

    def passage_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[PassagePart]:
        """The same of passages; first, end: blocks."""
        for number, value in self.parts(txn, document, first, end):
            with _named(document):
                part = decode_part(number, value, self._block_size)
            if part.end_block > first:
                yield part

    def passages(
        self, txn: Transaction, document: Document, first: int, end: int | None = None
    ) -> list[Passage]:
        """Passages `first` to `end` (exclusive; None: all) of a document, fewer at its end. Raises
        InvalidInput for a document that has none, CorruptMemory.
        """
        if not document.of_passages:
            raise InvalidInput(
                f"document {document.name!r} is not made of passages; ask for its tokens instead"
            )
        end = document.blocks if end is None else min(end, document.blocks)
        found: list[Passage] = []
        for part in self.passage_parts(txn, document.id, first, end) if first < end else ():
            low, high = max(0, first - part.first_block), max(0, end - part.first_block)
            found += part.passages[low:high]
        if len(found) < end - first:
            raise CorruptMemory(f"passages of {document.name!r} are missing; run verify")
        return found

    def tokens(
        self, txn: Transaction, document: Document, first: int, end: int | None = None
    ) -> TokenSpan:
        """Content tokens `first` to `end` (exclusive; None: all) of a document, fewer at its end.
        Raises CorruptMemory.
        """
        end = document.tokens if end is None else min(end, document.tokens)
        none = np.zeros(0, dtype=np.int64)
        if first >= end:
            return TokenSpan(none, none, 0)
        parts = list(self.token_parts(txn, document.id, first, end))
        # Each part is under a checksum; that none is missing or twice there must be seen here.
        starts = [part.first for part in parts]
        ends = [part.first + len(part.ids) for part in parts]
        if not parts or starts[0] > first or starts[1:] != ends[:-1] or ends[-1] < end:
            raise CorruptMemory(f"tokens of {document.name!r} are missing; run verify")
        start = starts[0]
        ids = np.concatenate([part.ids for part in parts])
        return TokenSpan(
            ids[first - start : end - start], ids[: first - start], parts[0].char_start
        )


@contextmanager
def _named(document: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptMemory(f"tokens of document {document}: {error}; run verify") from error


# Passages by their content

DIGEST_BYTES = 16
Digest = bytes


def digest_of(signature: bytes, codec: str, ids: np.ndarray) -> Digest:
    """The digest of a passage of these tokens; signature: Signature.digest."""
    content = b"".join((signature, codec.encode(), b"\0", np.asarray(ids).astype("<u4").tobytes()))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class StoredPassage(NamedTuple):
    """The row of a passage."""

    number: int
    digest: Digest
    references: int = 0  # of documents' lists; one that holds it twice counts twice
    bytes: int = 0  # of its record; 0: none is stored
    home: tuple[int, int] = (0, 0)  # document and block that referred to it last


class PassageCounts(NamedTuple):
    """How many passages there are, how many records are stored, and the bytes of these."""

    passages: int = 0
    stored: int = 0
    bytes: int = 0


class _Row(NamedTuple):
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    references: Count
    bytes: Count
    document: Count
    block: Block


class PassageTable:
    """The passages of one memory. Every method takes the transaction it works in."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    # Rows

    def number(self, txn: Transaction, digest: Digest) -> int | None:
        """The number of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("digests", digest)
        if value is None:
            return None
        try:
            return unpack(value, Count)
        except ValueError as error:
            raise _damaged(digest.hex(), error) from error

    def row(self, txn: Transaction, number: int) -> StoredPassage | None:
        """The row of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("passages", number_key(number))
        return None if value is None else _decode(number, value)

    def find(self, txn: Transaction, digest: Digest) -> StoredPassage | None:
        """The row of the passage of a digest, or None. Raises CorruptMemory."""
        number = self.number(txn, digest)
        if number is None:
            return None
        row = self.row(txn, number)
        if row is None or row.digest != digest:
            raise _damaged(digest.hex(), ValueError(f"number {number} is another's"))
        return row

    def all(self, txn: Transaction) -> Iterator[StoredPassage]:
        """Every passage, in order of number. Raises CorruptMemory."""
        for key, value in txn.scan_checked("passages"):
            yield _decode(read_number_key(key), value)

    def counts(self, txn: Transaction) -> PassageCounts:
        """All passages, counted. Raises CorruptMemory."""
        passages = stored = size = 0
        for row in self.all(txn):
            passages, stored, size = passages + 1, stored + (row.bytes > 0), size + row.bytes
        return PassageCounts(passages, stored, size)

    def correct(self, txn: Transaction, row: StoredPassage, references: int) -> None:
        """Set the references to a passage, and have it found by its digest."""
        self._put(txn, row._replace(references=references))
        txn.put_checked("digests", row.digest, msgpack.packb(row.number))

    def _put(self, txn: Transaction, row: StoredPassage) -> None:
        value = msgpack.packb([row.digest, row.references, row.bytes, *row.home])
        txn.put_checked("passages", number_key(row.number), value)

    # References

    def refer(
        self,
        txn: Transaction,
        document: int,
        first_block: int,
        digests: Sequence[Digest],
        new_number: Callable[[Transaction], int],
    ) -> list[StoredPassage]:
        """Count a document's references from its blocks `first_block` on; new_number: for passages
        that are new. Raises CorruptMemory.
        """
        rows = []
        for block, digest in enumerate(digests, first_block):
            row = self.find(txn, digest)
            if row is None:
                row = StoredPassage(new_number(txn), digest)
                txn.put_checked("digests", digest, msgpack.packb(row.number))
            rows.append(row._replace(references=row.references + 1, home=(document, block)))
            self._put(txn, rows[-1])
        return rows

    def release(self, txn: Transaction, digest: Digest) -> None:
        """Count a reference less; the passage goes with the last one. Raises CorruptMemory."""
        row = self.find(txn, digest)
        if row is None:
            return
        if row.references > 1:
            self._put(txn, row._replace(references=row.references - 1))
            return
        self._blocks.delete(txn, row.number)
        txn.delete("passages", number_key(row.number))
        txn.delete("digests", row.digest)

    # Records

    def store(self, txn: Transaction, row: StoredPassage, record: bytes) -> None:
        """Store the record of a passage that has none."""
        self._blocks.put(txn, RecordKey(row.number, 0, 0), record)
        self._put(txn, row._replace(bytes=len(record)))

    def drop_record(self, txn: Transaction, number: int) -> bool:
        """Delete the record of a passage, which stays by its tokens; return whether there is such a
        passage. Raises CorruptMemory.
        """
        row = self.row(txn, number)
        if row is not None:
            self._blocks.delete(txn, number)
            self._put(txn, row._replace(bytes=0))
        return row is not None


def _decode(number: int, value: bytes) -> StoredPassage:
    try:
        row = unpack(value, _Row)
    except ValueError as error:
        raise _damaged(str(number), error) from error
    return StoredPassage(number, *row[:3], home=row[3:])


def _damaged(which: str, error: ValueError) -> CorruptMemory:
    return CorruptMemory(f"the row of passage {which} is damaged ({error}); run verify --repair")
