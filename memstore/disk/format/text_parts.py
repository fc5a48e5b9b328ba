"""The text of a document as it is stored.

Where blocks are of equal size, a value of the table of tokens holds characters of the document
before a part (u64), then its ids (u32), little-endian. Of a document that is made of passages it
holds consecutive passages, as they were given to a writer; in msgpack: characters of the document
before it, of each passage its gap, lead, length and characters (columns), and all their ids (u32,
little-endian).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import msgpack
import msgspec
import numpy as np

from memstore.decode import Count, Packed, unpack


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
