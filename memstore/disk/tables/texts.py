"""The text of a memory's documents, in parts of tokens or of passages, and the passages, each of
which is stored once for all documents that hold it.

For blocks of equal size, a value of the table of tokens holds the characters of the document before
the part (u64), then its ids (u32), little-endian. For a document of passages it holds consecutive
passages in msgpack: the characters of the document before them, the gap, lead, length and
characters of each (columns), and all their ids (u32, little-endian).

A passage's digest covers all that determines its keys and values: the memory's signature, the codec
of its record, and its tokens with its lead. Table `digests` maps a digest to the passage's number;
table `passages` maps a number to the digest, the count of references, the bytes of its record (0:
not stored), and the document and block that referred to it last. A record can be computed from the
tokens, so it may be missing.
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

# Parts and their values


class TokenPart(NamedTuple):
    """A committed part of a document's tokens."""

    first: int  # number of the part's first token in the document
    char_start: int  # characters of the document before that token
    ids: np.ndarray  # int64 [n]


def encode_tokens(char_start: int, ids: Sequence[int] | np.ndarray) -> bytes:
    """Encode a part of a document's tokens. char_start: characters of the document before its first
    token. ids: content tokens (no landmarks), each below 2**32.
    """
    return char_start.to_bytes(8, "little") + np.asarray(ids, dtype="<u4").tobytes()


def decode_tokens(first: int, value: bytes) -> TokenPart:
    """Decode a part of tokens. Raises ValueError for an invalid value."""
    if len(value) < 12 or len(value) % 4:
        raise ValueError(f"{len(value)} bytes are an impossible length")
    ids = np.frombuffer(value, dtype="<u4", offset=8).astype(np.int64)
    return TokenPart(first, int.from_bytes(value[:8], "little"), ids)


def equal_lengths(tokens: int, block_size: int) -> np.ndarray:
    """Tokens of each block, int64 [blocks]; all blocks are full but the last."""
    blocks = -(-tokens // block_size)
    lengths = np.full(blocks, block_size, dtype=np.int64)
    if blocks:
        lengths[-1] = tokens - (blocks - 1) * block_size
    return lengths


Keep = Literal["kv", "text"]
""""kv": keys and values of passages are stored; "text": they are computed when needed."""


class Passage(NamedTuple):
    """One passage of a document, which is one block."""

    ids: np.ndarray  # int64 [n]: the lead, then its own tokens
    lead: int  # tokens of the lead: context before its own text
    gap: str  # text between the previous passage, or the document's beginning, and its own text
    start: int  # characters of the document before its own text
    characters: int  # characters of its own text

    @property
    def end(self) -> int:
        """Character offset in the document of the end of its own text."""
        return self.start + self.characters


class PassagePart(NamedTuple):
    """A committed part of a document's passages."""

    first_block: int
    start: int  # characters of the document before the part
    passages: list[Passage]

    @property
    def end_block(self) -> int:
        """The block after it."""
        return self.first_block + len(self.passages)

    @property
    def end(self) -> int:
        """Character offset in the document of its end."""
        return self.passages[-1].end


class _Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    start: Count
    gaps: list[str]
    leads: list[Count]
    lengths: list[Count]
    characters: list[Count]
    ids: bytes


def encode_part(start: int, passages: Sequence[Passage]) -> bytes:
    """Encode a part of passages; start: characters of the document before its first gap."""
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
    """Decode a part of passages. Raises ValueError for an invalid value."""
    part = unpack(value, _Part)
    count = len(part.gaps)
    if not len(part.leads) == len(part.lengths) == len(part.characters) == count:
        raise ValueError("its columns differ in length")
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


# The table of tokens


class TokenSpan(NamedTuple):
    """Consecutive tokens of a document, and the position of their characters.

    The first token of `ids` begins at character char_start + (length of the text of `before`).
    """

    ids: np.ndarray  # int64 [n]
    before: np.ndarray  # int64 [m], the tokens between char_start and the first of `ids`
    char_start: int


class TextTable:
    """The text of one memory's documents. Every method takes a transaction."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def put_part(self, txn: Transaction, document: int, number: int, value: bytes) -> None:
        """Write a part that encode_tokens or encode_part made; number: its first token or
        passage.
        """
        txn.put_checked("tokens", tokens_key(document, number), value)

    def parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(first number, value) of the parts that hold tokens, or passages, `first` to `end`
        (exclusive; None for all), in order.

        The iterator is valid during the transaction.
        """
        low, high = document_range(document)
        if end is not None:
            high = tokens_key(document, end)
        start = txn.key_at_or_before("tokens", tokens_key(document, first))
        if start is None or start < low:
            start = low
        for key, value in txn.scan_checked("tokens", start, high):
            yield read_tokens_key(key)[1], value

    def passage_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[PassagePart]:
        """As `parts`, decoded, of a document of passages; first, end: blocks. Raises
        CorruptMemory.
        """
        for number, value in self.parts(txn, document, first, end):
            with _named(document):
                part = decode_part(number, value, self._block_size)
            if part.end_block > first:
                yield part

    def passages(
        self, txn: Transaction, document: Document, first: int, end: int | None = None
    ) -> list[Passage]:
        """Passages `first` to `end` (exclusive; None: all) of a document, fewer at its end. Raises
        InvalidInput for a document without passages, CorruptMemory.
        """
        if not document.of_passages:
            raise InvalidInput(
                f"document {document.name!r} has no passages; read its tokens instead"
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
        with _named(document.id):
            every = [decode_tokens(*part) for part in self.parts(txn, document.id, first, end)]
        parts = [part for part in every if part.first + len(part.ids) > first]
        # each part has a checksum, but missing or repeated parts are noticed only here
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


# Passages by content

DIGEST_BYTES = 16
Digest = bytes


def digest_of(signature: bytes, codec: str, ids: np.ndarray) -> Digest:
    """The digest of a passage with these tokens; signature: Signature.digest."""
    content = b"".join((signature, codec.encode(), b"\0", np.asarray(ids).astype("<u4").tobytes()))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class StoredPassage(NamedTuple):
    """The row of a passage."""

    number: int
    digest: Digest
    references: int = 0  # a document that holds it twice counts twice
    bytes: int = 0  # bytes of its record; 0: not stored
    home: tuple[int, int] = (0, 0)  # document and block that referred to it last


class PassageCounts(NamedTuple):
    """The number of passages, the number of stored records, and their bytes."""

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
    """The passages of one memory. Every method takes a transaction."""

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
        """The row of the passage with this digest, or None. Raises CorruptMemory."""
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
        """Counts of all passages. Raises CorruptMemory."""
        passages = stored = size = 0
        for row in self.all(txn):
            passages, stored, size = passages + 1, stored + (row.bytes > 0), size + row.bytes
        return PassageCounts(passages, stored, size)

    def correct(self, txn: Transaction, row: StoredPassage, references: int) -> None:
        """Set a passage's count of references, and repair the entry of its digest."""
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
        """Count a document's references from block `first_block` on; new_number: gives numbers to
        new passages. Raises CorruptMemory.
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
        """Drop one reference, and with the last one the passage. Raises CorruptMemory."""
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
        """Store the record of a passage without one."""
        self._blocks.put(txn, RecordKey(row.number, 0, 0), record)
        self._put(txn, row._replace(bytes=len(record)))

    def drop_record(self, txn: Transaction, number: int) -> bool:
        """Delete the record of a passage, but not the passage; return whether the passage exists.
        Raises CorruptMemory.
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
