"""The stored index of a search in two stages: a head, and parts that are read when they are needed.
The parts are the lists of token landmarks (memstore.index.token_lists), then the words in order, in
pieces (memstore.index.word_index).

They are files in a memory's directory (`passages.idx`, the head, and `passages.lists`, the parts,
which are mapped), or objects of a publication.
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

HEAD = "passages.idx"  # the file of the head

# The arrays of a head, as Encoding.head has them.
_KINDS = "<u2", "<u8", "i1", "<f4", "<f4", "<u4", "<u8", "<f4", "<u8"
_SIZES, _DIGESTS = 5, 6

Pieces = Sequence[bytes | memoryview]
"""Bytes, in pieces that follow each other."""


class Covered(NamedTuple):
    """A document in lists, as it was when they were made: its blocks are consecutive passages."""

    name: Annotated[str, Meta(max_length=4096)]
    blocks: Block
    state: bytes  # changes with the document


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
    """The same, in parts."""

    lengths: np.ndarray
    postings: StoredPostings


class Made(NamedTuple):
    """A new index for a selector."""

    lists: TokenLists  # all in memory
    words: PassageWords | None  # None: the selector keeps none
    covered: list[Covered]
    digest: str  # of the selector


class Kept(NamedTuple):
    """The stored index of a selector."""

    lists: TokenLists
    words: StoredWords | None
    covered: list[Covered]


class Place(Protocol):
    """A place that an index is stored in."""

    @property
    def name(self) -> str:
        """The name for people."""

    @property
    def stamp(self) -> Hashable:
        """Changes with the index; None where there is none."""

    def head(self) -> np.ndarray:
        """The bytes of the head, uint8. Raises FileNotFoundError (there is none), Unusable,
        OSError, CorruptMemory, StoreUnavailable.
        """

    def parts(self, size: int) -> PartReader:
        """A reader of the parts, of so many bytes in all. Raises as `head`."""

    def write(self, made: Made) -> int:
        """Replace the index; return the bytes of the new one. Raises StorageFull, ReadOnlyMemory,
        StoreUnavailable.
        """


class Encoding:
    """What was made, as bytes: first its parts, then the head with their checksums."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._digests: list[int] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        """The parts one after the other, uint8 each."""
        for part in self._parts():
            self._digests.append(xxh3_64_intdigest(part.data))
            yield part

    def _parts(self) -> Iterator[np.ndarray]:
        lists, words = self._made.lists, self._made.words
        for number in range(len(lists.sizes)):
            yield list_content(lists.index, number)
        if words is not None:
            yield from words.postings.pieces()

    def head(self) -> Pieces:
        """The head, once all parts were taken."""
        lists, words, covered, digest = self._made
        header = {
            "digest": digest,
            "passages": lists.passages,
            "covered": [list(one) for one in covered],
            "width": int(lists.index.d),
            "stride": int(lists.sample.rows[1]) if len(lists.sample.rows) > 1 else 1,
            "words": 0 if words is None else len(words.postings.keys),
        }
        centroids, codebook = trained_of(lists.index)
        arrays = [
            lists.lengths.astype("<u2"), lists.digests, lists.sample.landmarks, centroids,
            codebook, lists.sizes.astype("<u4"), np.array(self._digests, np.uint64),
            np.zeros(0, np.float32) if words is None else words.lengths,
            np.zeros(0, np.uint64) if words is None else words.postings.firsts,
        ]  # fmt: skip
        return encode_file(header, [array.view(np.uint8).ravel() for array in arrays])


class ListsHead:
    """A decoded head. Parts of another head are damaged to it."""

    def __init__(self, content: np.ndarray, digest: str) -> None:
        """content: Place.head; digest: of the selector. Raises Unusable."""
        self.content = content
        self._header, self._arrays = decode_file(HEAD, content, _Header)
        if self._header.digest != digest:
            raise Unusable(f"{HEAD} is of another selector")

    @property
    def covered(self) -> list[Covered]:
        """The documents in the lists."""
        return self._header.covered

    def parts(self, place: Place) -> StoredParts:
        """All parts. Raises as Place.parts."""
        with understood(HEAD):
            sizes, digests = self._arrays[_SIZES].view("<u4"), self._arrays[_DIGESTS].view("<u8")
            lengths = _lengths(self._header, sizes, digests)
        return StoredParts(place.parts(int(lengths.sum())), lengths, digests)

    def kept(self, place: Place, width: int) -> Kept:
        """The index of a selector whose landmarks have this width. Raises InvalidInput (FAISS is
        missing), and as Place.parts.
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
        raise ValueError("its parts are not those that it names")
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
            # one replaces its file right after the other: a full disk leaves the old ones
            with new_file(self._path / _PARTS) as file, new_file(self._path / HEAD) as head:
                parts = Encoding(made)
                file.writelines(part.data for part in parts)
                head.writelines(parts.head())
            return sum((self._path / name).stat().st_size for name in (HEAD, _PARTS))
