"""What passages are found by in two stages, as it is kept: a head, and parts of any number of bytes
that are read as they are asked for. The parts are the lists of token landmarks, each by itself
(memstore.index.token_lists), then the words in order, in pieces (memstore.index.word_index).

Where it is kept: in files beside a memory (`passages.idx`, the head, and `passages.lists`, the
parts, which are mapped), or in objects of a published one.
"""

import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Block, Count, Positive
from memstore.disk.files import sweep
from memstore.errors import InvalidInput
from memstore.index.index_file import (
    MappedFile,
    PartReader,
    Parts,
    StoredParts,
    Unusable,
    content_of,
    decode_file,
    encode_file,
    new_file,
    refusals,
    understood,
)
from memstore.index.token_lists import (
    CODE,
    LEVELS,
    ListedTokens,
    Sample,
    TokenLists,
    Trained,
    empty_index,
    list_bytes,
    list_content,
    trained_of,
)
from memstore.index.word_index import PIECE, HeldPostings, StoredPostings, piece_bytes

HEAD = "passages.idx"  # as the head is called where it is a file

# The arrays of a head, as `encode` has them.
_KINDS = "<u2", "<u8", "i1", "<f4", "<f4", "<u4", "<u8", "<f4", "<u8"
_SIZES, _DIGESTS = 5, 6

Pieces = Sequence[bytes | memoryview]
"""Bytes, in pieces that follow each other."""


class Covered(NamedTuple):
    """A document in lists: its blocks 0 .. in consecutive passages, as it was when they were
    made.
    """

    name: Annotated[str, Meta(max_length=4096)]
    blocks: Block
    state: bytes  # tells whether it is still the same


class _Header(Parts):
    digest: str  # of the selector
    passages: Positive
    covered: list[Covered]
    width: Positive
    stride: Positive  # of the sample
    words: Count  # 0 where the selector keeps none


class PassageWords(NamedTuple):
    """The words of all passages."""

    lengths: np.ndarray  # float32 [passages]: words of each
    postings: HeldPostings


class StoredWords(NamedTuple):
    """The same, where they are kept."""

    lengths: np.ndarray
    postings: StoredPostings


class Made(NamedTuple):
    """What was made for a selector."""

    lists: TokenLists  # that hold everything
    words: PassageWords | None  # None: the selector keeps none
    covered: list[Covered]
    digest: str  # of the selector


class Kept(NamedTuple):
    """What is kept for a selector."""

    lists: TokenLists
    words: StoredWords | None
    covered: list[Covered]


class Place(Protocol):
    """Where it is kept."""

    @property
    def name(self) -> str:
        """As people call it."""

    @property
    def stamp(self) -> Hashable:
        """Tells what is there from what was there before; None for nothing."""

    def head(self) -> np.ndarray:
        """The bytes of the head, uint8. Raises FileNotFoundError (there is none), Unusable,
        OSError, CorruptMemory, StoreUnavailable.
        """

    def parts(self, size: int) -> PartReader:
        """What reads the parts, of so many bytes in all. Raises as `head`."""

    def write(self, made: Made) -> int:
        """Keep what was made, in place of what is there; return its bytes. Raises StorageFull,
        ReadOnlyMemory, StoreUnavailable.
        """


def encode(made: Made, digests: Sequence[int]) -> Pieces:
    """The head. digests: XXH3-64 of each of encode_parts."""
    lists, words, _, digest = made
    header = {
        "digest": digest,
        "passages": lists.passages,
        "covered": [list(one) for one in made.covered],
        "width": int(lists.index.d),
        "stride": int(lists.sample.rows[1]) if len(lists.sample.rows) > 1 else 1,
        "words": 0 if words is None else len(words.postings.keys),
    }
    centroids, codebook = trained_of(lists.index)
    arrays = [
        lists.lengths.astype("<u2"), lists.digests, lists.sample.landmarks, centroids, codebook,
        lists.sizes.astype("<u4"), np.array(digests, np.uint64),
        np.zeros(0, np.float32) if words is None else words.lengths,
        np.zeros(0, np.uint64) if words is None else words.postings.firsts,
    ]  # fmt: skip
    return encode_file(header, [array.view(np.uint8).ravel() for array in arrays])


def encode_parts(made: Made) -> Iterator[np.ndarray]:
    """The parts one after the other, uint8 each."""
    for number in range(len(made.lists.sizes)):
        yield list_content(made.lists.index, number)
    if made.words is not None:
        yield from made.words.postings.pieces()


class Digested:
    """Parts that go by; their checksums are told behind them."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._digests: list[int] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        for part in encode_parts(self._made):
            self._digests.append(xxh3_64_intdigest(part.data))
            yield part

    def head(self) -> Pieces:
        """The head of all that went by."""
        return encode(self._made, self._digests)


class ListsHead:
    """What a head says, read once: what is of another head is damaged to it."""

    def __init__(self, content: np.ndarray, digest: str) -> None:
        """content: Place.head; digest: of the selector. Raises Unusable."""
        self.content = content
        self._header, self._arrays = decode_file(HEAD, content, _Header)
        if self._header.digest != digest:
            raise Unusable(f"{HEAD} is of another selector")

    @property
    def covered(self) -> list[Covered]:
        """The documents that lists are of."""
        return self._header.covered

    def parts(self, place: Place) -> StoredParts:
        """All parts. Raises as Place.parts."""
        with understood(HEAD):
            sizes, digests = self._arrays[_SIZES].view("<u4"), self._arrays[_DIGESTS].view("<u8")
            lengths = _lengths(self._header, sizes, digests)
        return StoredParts(place.parts(int(lengths.sum())), lengths, digests)

    def kept(self, place: Place, width: int) -> Kept:
        """What is kept for a selector whose landmarks have this width. Raises InvalidInput (FAISS
        is missing), and as Place.parts.
        """
        header = self._header
        with understood(HEAD):
            lengths, of_passages, near, centroids, codebook, sizes, digests, of_words, firsts = (
                array.view(kind) for array, kind in zip(self._arrays, _KINDS, strict=True)
            )
            tokens = ListedTokens(lengths.astype(np.int64), of_passages)
            rows = np.arange(0, len(lengths), header.stride)
            sample = Sample(rows, near.reshape(-1, header.width), tokens.lengths[rows])
            trained = Trained(
                centroids.reshape(-1, header.width), codebook.reshape(2 * CODE, LEVELS, -1)
            )
            _check(header, tokens, sample, trained, sizes)
            every, n = _lengths(header, sizes, digests), len(sizes)
            if len(firsts) != len(every) - n or len(of_words) not in (0, header.passages):
                raise ValueError("its words are not those of its passages")
            if (
                not (of_words >= 0).all()
                or not np.isfinite(of_words).all()
                or header.width != width
            ):
                raise ValueError("its numbers are none of this selector")
            index = empty_index(trained)
            index.ntotal = int(sizes.sum())
        reader = place.parts(int(every.sum()))
        stored = StoredParts(reader, every[:n], digests[:n])
        lists = TokenLists(index, sizes.astype(np.int64), tokens, sample, stored)
        if not len(of_words):
            return Kept(lists, None, header.covered)
        pieces = StoredParts(reader, every[n:], digests[n:], int(every[:n].sum()))
        words = StoredWords(of_words, StoredPostings(pieces, firsts, header.passages))
        return Kept(lists, words, header.covered)


def _lengths(header: _Header, sizes: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """The bytes of each part, int64. Raises ValueError."""
    if len(digests) != len(sizes) - (-header.words // PIECE):
        raise ValueError("its parts are not those that it tells")
    return np.concatenate([list_bytes(sizes.astype(np.int64)), piece_bytes(header.words)])


def _check(
    header: _Header, tokens: ListedTokens, sample: Sample, trained: Trained, sizes: np.ndarray
) -> None:
    """Do the parts of a head fit together? Raises ValueError."""
    passages, width = header.passages, header.width
    right = (
        len(tokens.lengths) == len(tokens.digests) == passages
        and passages == sum(one.blocks for one in header.covered)
        and len(sample.landmarks) == sample.lengths.sum()
        and trained.codebook.size == LEVELS * width
        and width % (2 * CODE) == 0
        and 0 < len(trained.centroids) == len(sizes)
        and tokens.lengths.all()
        and sizes.sum(dtype=np.int64) == tokens.lengths.sum()
        and np.isfinite(trained.centroids).all()
        and np.isfinite(trained.codebook).all()
    )
    if not right:
        raise ValueError("its numbers contradict each other")


_PARTS = "passages.lists"


class PassageDirectory:
    """The directory `index` of a memory as a Place of passage_files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """See Place."""
        return str(self._path)

    @property
    def stamp(self) -> tuple[int, int] | None:
        """See Place."""
        try:
            status = os.stat(self._path / HEAD)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def head(self) -> np.ndarray:
        """See Place."""
        return content_of(self._path / HEAD)

    def parts(self, size: int) -> MappedFile:
        """See Place."""
        try:
            return MappedFile(self._path / _PARTS, size)
        except InvalidInput as error:
            raise Unusable(str(error)) from error

    def write(self, made: Made) -> int:
        """See Place."""
        if not self._path.is_symlink():
            sweep(self._path)
        with refusals(self._path):
            # one takes its place right behind the other: a full disk leaves those that were
            with new_file(self._path / _PARTS) as file, new_file(self._path / HEAD) as head:
                parts = Digested(made)
                file.writelines(part.data for part in parts)
                head.writelines(parts.head())
            return sum((self._path / name).stat().st_size for name in (HEAD, _PARTS))
