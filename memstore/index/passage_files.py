"""The files by which passages are found in two stages: `passages.idx`, checked as a whole, and
`passages.lists`, which is mapped: lists of token landmarks, and words.

A search reads what it looks at. What is damaged in a list proposes a wrong passage, whose exact
score then speaks against it; words are checked as they are read.
"""

import mmap
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from memstore.decode import Block, Count, Positive
from memstore.disk.files import open_regular
from memstore.index.faiss_head import faiss
from memstore.index.index_file import Parts, Unusable, new_file, read_file, understood, write_file
from memstore.index.token_lists import CODE, Sample, TokenLists
from memstore.index.word_postings import PIECE, HeldPostings, MappedPostings

_POSTING = 10  # bytes of a word of a passage
_ID = 16  # bytes, random: which lists a header is of


class Covered(NamedTuple):
    """A document in lists: its blocks 0 .. in consecutive passages, as it was when they were
    made.
    """

    document: int
    blocks: Block
    state: bytes  # tells whether it is still the same


class _Header(Parts):
    digest: str  # of the selector
    id: Annotated[bytes, msgspec.Meta(min_length=_ID, max_length=_ID)]
    size: Positive  # of the other file
    covered: list[tuple[int, Block, bytes]]
    lists: list[Count]  # landmarks of each
    width: Positive
    stride: Positive  # of the sample
    words: Count  # how many follow the lists; 0 where the selector keeps none


class Words(NamedTuple):
    """The words of all passages."""

    lengths: np.ndarray  # float32 [passages]: words of each
    postings: HeldPostings | MappedPostings


class Found(NamedTuple):
    """What the files hold."""

    lists: TokenLists
    words: Words | None  # None: the selector keeps none
    covered: list[Covered]
    bytes: int  # of both files


def write(
    directory: Path, lists: TokenLists, words: Words | None, covered: list[Covered], digest: str
) -> Found:
    """Write what was made for a selector of this digest; return it as it is read. Raises
    OSError.
    """
    library, index = faiss(), lists.index
    held, name = index.invlists, os.urandom(_ID)
    sizes = [held.list_size(number) for number in range(index.nlist)]
    of_words: list[np.ndarray] = [np.zeros(0, np.uint64)] * 3
    if words is not None:
        assert isinstance(words.postings, HeldPostings)
        firsts = words.postings.keys[::PIECE].copy()
        of_words = [words.lengths, firsts, words.postings.digests()]
    with new_file(directory / "passages.lists") as file:
        file.write(name)
        for number, size in enumerate(sizes):
            if size:
                file.write(library.rev_swig_ptr(held.get_codes(number), size * CODE).data)
                file.write(library.rev_swig_ptr(held.get_ids(number), size).data)
        if words is not None:
            file.write(words.postings.keys.data)
            file.write(words.postings.counts.data)
        end = file.tell()
    _replace(index, library.ArrayInvertedLists(index.nlist, CODE))
    header = {
        "digest": digest,
        "id": name,
        "size": end,
        "covered": [list(one) for one in covered],
        "lists": sizes,
        "width": int(index.d),
        "stride": int(lists.sample.rows[1]) if len(lists.sample.rows) > 1 else 1,
        "words": 0 if words is None else len(words.postings.keys),
    }
    empty = library.serialize_index(index)
    parts = [empty, lists.lengths.astype("<u2"), lists.sample.landmarks, *of_words]
    write_file(directory / "passages.idx", header, [part.view(np.uint8).ravel() for part in parts])
    return read(directory, digest)


def read(directory: Path, digest: str) -> Found:
    """What was written for a selector of this digest. Raises Unusable, FileNotFoundError, OSError,
    InvalidInput (FAISS is missing).
    """
    path = directory / "passages.idx"
    header, parts = read_file(path, _Header)
    if header.digest != digest:
        raise Unusable(f"{path.name} is of another selector")
    with understood(path):
        stored, lengths, near, *of_words = parts
        of_passages = lengths.view("<u2").astype(np.int64)
        rows = np.arange(0, len(of_passages), header.stride)
        sample = Sample(rows, near.view(np.int8).reshape(-1, header.width), of_passages[rows])
        covered = [Covered(*one) for one in header.covered]
        lists_end = _ID + (CODE + 8) * sum(header.lists)
        right = (
            sum(header.lists) == of_passages.sum()
            and sum(one.blocks for one in covered) == len(of_passages)
            and len(sample.landmarks) == sample.lengths.sum()
            and header.size == lists_end + _POSTING * header.words
        )
        if not right or not of_passages.all():
            raise ValueError("its numbers contradict each other")
        index = _index(stored, header)
        content = _map(directory / "passages.lists", index, header)
        words = _words(content, lists_end, header.words, of_words, len(of_passages))
        size = header.size + path.stat().st_size
        return Found(TokenLists(index, of_passages, sample), words, covered, size)


def _words(
    content: mmap.mmap, start: int, count: int, parts: list[np.ndarray], passages: int
) -> Words | None:
    lengths, firsts, digests = (
        part.view(kind) for part, kind in zip(parts, ("<f4", "<u8", "<u8"), strict=True)
    )
    if not len(lengths) and not count:
        return None
    if not len(lengths) == passages or not len(firsts) == len(digests) == -(-count // PIECE):
        raise ValueError("its words are not those of its passages")
    keys = np.frombuffer(content, "<u8", count, start)
    counts = np.frombuffer(content, "<u2", count, start + 8 * count)
    return Words(lengths, MappedPostings(keys, counts, firsts, digests))


def _index(stored: np.ndarray, header: _Header) -> Any:
    """FAISS's index without lists. Raises ValueError for another kind: some kinds open files."""
    if stored[:4].tobytes() != b"IwPQ" or b"ilod" in stored.tobytes():
        raise ValueError("no empty inverted lists")
    index = faiss().deserialize_index(stored)
    right = (
        type(index).__name__ == "IndexIVFPQ"
        and (index.d, index.nlist) == (header.width, len(header.lists))
        and (index.ntotal, index.code_size) in ((0, CODE), (sum(header.lists), CODE))
    )
    if not right:
        raise ValueError("its lists are of another shape")
    return index


def _map(path: Path, index: Any, header: _Header) -> mmap.mmap:
    """Have an index search the lists of a file; return its content."""
    library = faiss()
    held, places = library.OnDiskInvertedLists(), library.OnDiskOneListVector()
    at = _ID
    for size in header.lists:
        one = library.OnDiskOneList()
        one.size, one.capacity, one.offset = size, size, at
        places.push_back(one)
        at += (CODE + 8) * size
    held.nlist, held.code_size, held.lists = len(header.lists), CODE, places
    held.totsize, held.read_only = header.size, True
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(_ID) != header.id or size != header.size:
            raise Unusable(f"{path.name} is not the one that passages.idx is of")
        held.filename = f"/dev/fd/{file.fileno()}"  # this file, whatever takes its place
        held.do_mmap()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _replace(index, held)
    index.ntotal = sum(header.lists)
    return content


def _replace(index: Any, lists: Any) -> None:
    index.replace_invlists(lists, True)
    lists.this.disown()  # the index frees them, not Python
