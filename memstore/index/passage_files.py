"""The stored index of a search in two stages: lists of token landmarks (memstore.index.token_lists)
and words (memstore.index.word_index) of passages, in one file, `passages.idx`, or in objects of a
publication.
"""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from memstore.decode import Block, Positive
from memstore.disk.files import sweep
from memstore.index.index_file import (
    Parts,
    Unusable,
    content_of,
    decode_file,
    decode_header,
    encode_file,
    new_file,
    refusals,
    understood,
)
from memstore.index.inverted_lists import arrays_of, index_of
from memstore.index.token_lists import KIND, TokenLists
from memstore.index.word_index import HeldPostings

FILE = "passages.idx"

# The arrays before the codes of lists, as `encode` writes them.
_KINDS = "<u8", "<u8", "<u2", "<f4", "<u2", "i1", "<f4", "<f4", "<u4", "<u4"


class Covered(NamedTuple):
    """A document in lists, as it was when they were made: its blocks are consecutive passages."""

    name: Annotated[str, Meta(max_length=4096)]
    blocks: Block
    state: bytes  # changes with the document


class PassageLists(NamedTuple):
    """The index of a selector."""

    lists: TokenLists
    # float32 [passages], words of each, and all words; None: the selector stores none
    words: tuple[np.ndarray, HeldPostings] | None
    covered: list[Covered]
    digest: str  # of the selector


class _Header(Parts):
    digest: str  # of the selector
    covered: list[Covered]
    stride: Positive  # of the sample


def encode(made: PassageLists) -> list[bytes | memoryview]:
    """An index as bytes: the header, then the rest in pieces."""
    lists, words, covered, digest = made
    header = {"digest": digest, "covered": [list(one) for one in covered], "stride": lists.stride}
    none = np.zeros(0)
    of_words, (keys, counts) = (none, (none, none)) if words is None else words
    arrays = [lists.digests, keys, counts, of_words, lists.lengths, lists.sample]
    arrays += arrays_of(lists.index)
    kinds = [*_KINDS, *["u1"] * (len(arrays) - len(_KINDS))]
    typed = [array.astype(kind, copy=False) for array, kind in zip(arrays, kinds)]
    return encode_file(header, [array.view(np.uint8).ravel() for array in typed])


def covered_by(content: np.ndarray, digest: str) -> list[Covered]:
    """The documents in the index of a selector, by its header. Raises Unusable."""
    header, _ = decode_header(FILE, content, _Header)
    if header.digest != digest:
        raise Unusable(f"{FILE} is of another selector")
    return header.covered


def decode(content: np.ndarray, digest: str, width: int) -> PassageLists:
    """The index of a selector whose landmarks have this width. Raises Unusable, InvalidInput (FAISS
    is missing).
    """
    covered = covered_by(content, digest)
    header, parts = decode_file(FILE, content, _Header)
    with understood(FILE):
        passages = sum(one.blocks for one in covered)
        # copies: the file may be changed or removed, and a copy is aligned
        digests, keys, counts, of_words, lengths, sample, centroids, codebook, sizes, ids = (
            np.array(part.view(kind)) for part, kind in zip(parts, _KINDS)
        )
        lengths, sample = lengths.astype(np.int64), sample.reshape(-1, width)
        right = (
            0 < passages == len(lengths) == len(digests)
            and lengths.all()
            and len(ids) == lengths.sum()
            and ids.max() < passages
            and len(sample) == lengths[:: header.stride].sum()
            and len(of_words) in (0, passages)
            and len(keys) == len(counts)
            and (not len(keys) or keys.astype(np.uint32).max() < len(of_words))
            and np.isfinite(of_words).all()
            and (of_words >= 0).all()
        )
        if not right:
            raise ValueError("its numbers contradict each other")
        centroids = centroids.reshape(-1, width)
        index = index_of(KIND, centroids, codebook, sizes, ids, parts[len(_KINDS) :])
    words = (of_words, HeldPostings(keys, counts)) if len(of_words) else None
    lists = TokenLists(index, lengths, digests, header.stride, sample)
    return PassageLists(lists, words, covered, digest)


class PassageDirectory:
    """The directory `index` of a memory, which the index is stored in. Methods raise
    FileNotFoundError (there is none), Unusable, OSError.
    """

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path

    @property
    def stamp(self) -> Hashable:
        """Changes with the index; None where there is none."""
        try:
            status = os.stat(self._path / FILE)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def header(self) -> np.ndarray:
        """The first bytes of `content`, from which `covered_by` decodes."""
        return self.content()

    def content(self) -> np.ndarray:
        """What `encode` returned, uint8."""
        return content_of(self._path / FILE)

    def write(self, made: PassageLists) -> int:
        """Replace the index; return the bytes of the new one. Raises StorageFull,
        ReadOnlyMemory.
        """
        if not self._path.is_symlink():
            sweep(self._path)
        with refusals(self._path), new_file(self._path / FILE) as file:
            file.writelines(encode(made))
            return file.tell()
