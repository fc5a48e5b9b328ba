"""The files by which passages are found in two stages: `passages.idx`, a header, and
`passages.lists`: lists of token landmarks, which are read when they are first asked for, and words,
which are mapped and checked as they are read.
"""

import errno
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from memstore.decode import Block, Count, Positive
from memstore.disk.files import open_regular
from memstore.index.faiss_head import faiss
from memstore.index.index_file import Parts, Unusable, new_file, read_file, understood, write_file
from memstore.index.token_lists import CODE, Sample, TokenLists
from memstore.index.word_postings import PIECE, HeldPostings, MappedPostings

NAMES = "passages.idx", "passages.lists"

_POSTING = 10  # bytes of a word of a passage


class Covered(NamedTuple):
    """A document in lists: its blocks 0 .. in consecutive passages, as it was when they were
    made.
    """

    document: int
    blocks: Block
    state: bytes  # tells whether it is still the same


class _Header(Parts):
    digest: str  # of the selector
    passages: Positive
    lists: Positive  # bytes of them in the other file
    checksum: bytes  # of these
    covered: list[tuple[int, Block, bytes]]
    width: Positive
    stride: Positive  # of the sample
    words: Count  # how many follow them; 0 where the selector keeps none


class PassageWords(NamedTuple):
    """The words of all passages."""

    lengths: np.ndarray  # float32 [passages]: words of each
    postings: HeldPostings | MappedPostings


class PassageFiles(NamedTuple):
    """What the files hold."""

    lists: TokenLists
    words: PassageWords | None  # None: the selector keeps none
    covered: list[Covered]


def write(
    directory: Path,
    lists: TokenLists,
    words: PassageWords | None,
    covered: list[Covered],
    digest: str,
) -> None:
    """Write what was made for a selector of this digest. Raises OSError."""
    of_words: list[np.ndarray] = [np.zeros(0, np.uint64)] * 3
    if words is not None:
        assert isinstance(words.postings, HeldPostings)
        firsts = words.postings.keys[::PIECE].copy()
        of_words = [words.lengths, firsts, words.postings.digests()]
    with new_file(directory / "passages.lists") as file:
        try:
            faiss().write_index(lists.index, f"/dev/fd/{file.fileno()}")
        except RuntimeError as error:  # FAISS does not say which
            raise OSError(errno.ENOSPC, str(error)) from error
        size = file.seek(0, os.SEEK_END)
        file.write(b"\0" * (_words_at(size) - size))
        if words is not None:
            file.write(words.postings.keys.data)
            file.write(words.postings.counts.data)
        file.flush()
        with open(f"/dev/fd/{file.fileno()}", "rb") as again:
            checksum = _checksum(again, size)
    header = {
        "digest": digest,
        "passages": lists.passages,
        "lists": size,
        "checksum": checksum,
        "covered": [list(one) for one in covered],
        "width": int(lists.index.d),
        "stride": int(lists.sample.rows[1]) if len(lists.sample.rows) > 1 else 1,
        "words": 0 if words is None else len(words.postings.keys),
    }
    parts = [lists.lengths.astype("<u2"), lists.sample.landmarks, *of_words]
    write_file(directory / "passages.idx", header, [part.view(np.uint8).ravel() for part in parts])


def covered(directory: Path, digest: str) -> list[Covered]:
    """The documents that are in the lists of a selector of this digest. Raises Unusable,
    FileNotFoundError, OSError.
    """
    header, _ = _header(directory, digest)
    return [Covered(*one) for one in header.covered]


def read(directory: Path, digest: str) -> PassageFiles:
    """What was written for a selector of this digest. Raises Unusable, FileNotFoundError, OSError,
    InvalidInput (FAISS is missing).
    """
    path = directory / "passages.idx"
    header, parts = _header(directory, digest)
    with understood(path):
        lengths, near, *of_words = parts
        of_passages = lengths.view("<u2").astype(np.int64)
        rows = np.arange(0, len(of_passages), header.stride)
        sample = Sample(rows, near.view(np.int8).reshape(-1, header.width), of_passages[rows])
        documents = [Covered(*one) for one in header.covered]
        right = (
            len(of_passages) == header.passages == sum(one.blocks for one in documents)
            and len(sample.landmarks) == sample.lengths.sum()
        )
        if not right or not of_passages.all():
            raise ValueError("its numbers contradict each other")
        index, content = _open(directory / "passages.lists", header)
        if int(index.ntotal) != of_passages.sum():
            raise ValueError("its lists are not of its passages")
        words = _words(content, header, of_words)
        return PassageFiles(TokenLists(index, of_passages, sample), words, documents)


def _header(directory: Path, digest: str) -> tuple[_Header, list[np.ndarray]]:
    path = directory / "passages.idx"
    header, parts = read_file(path, _Header)
    if header.digest != digest:
        raise Unusable(f"{path.name} is of another selector")
    return header, parts


def _open(path: Path, header: _Header) -> tuple[Any, mmap.mmap]:
    """FAISS's index, and the content of the whole file. Raises Unusable, ValueError for another
    kind of index: some kinds open files.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != _words_at(header.lists) + _POSTING * header.words:
            raise Unusable(f"{path.name} is not the one that passages.idx is of")
        if file.read(4) != b"IwPf" or _checksum(file, header.lists) != header.checksum:
            raise Unusable(f"{path.name} is damaged, or not the one that passages.idx is of")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.seek(0)  # which some systems go on from
        # the file that was looked at, whatever takes its place
        index = faiss().read_index(f"/dev/fd/{file.fileno()}")
    right = type(index).__name__ == "IndexIVFPQFastScan" and index.d == header.width
    if not right or index.code_size != CODE:
        raise ValueError("its lists are of another kind")
    return index, content


def _words_at(lists: int) -> int:
    """Where words begin behind lists of so many bytes."""
    return -(-lists // 8) * 8


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Of the first bytes of a file."""
    digest, left = xxhash.xxh3_64(), size
    file.seek(0)
    while left and (piece := file.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    return digest.digest()


def _words(content: mmap.mmap, header: _Header, parts: list[np.ndarray]) -> PassageWords | None:
    lengths, firsts, digests = (
        part.view(kind) for part, kind in zip(parts, ("<f4", "<u8", "<u8"), strict=True)
    )
    count, start = header.words, _words_at(header.lists)
    if not len(lengths) and not count:
        return None
    pieces = -(-count // PIECE)
    if len(lengths) != header.passages or not len(firsts) == len(digests) == pieces:
        raise ValueError("its words are not those of its passages")
    keys = np.frombuffer(content, "<u8", count, start)
    counts = np.frombuffer(content, "<u2", count, start + 8 * count)
    return PassageWords(lengths, MappedPostings(keys, counts, firsts, digests))
