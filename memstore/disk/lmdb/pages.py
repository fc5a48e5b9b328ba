"""Pages of LMDB's data file (0.9), read without LMDB: the two meta pages, the trees of keys, and
where values lie.

LMDB's Python binding touches every page of a value that it finds, one after the other, and LMDB may
end the process on a damaged page of keys, or where the disk fails. Here such a page is an error.
"""

import mmap
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

_HEADER = 16  # bytes of a page's header
_PAGE = struct.Struct("<Q2xHHH")  # number, flags, end of the nodes' offsets, begin of the nodes
_VALUE_PAGE = struct.Struct("<Q2xHI")  # number, flags, pages that the value takes
_NODE = struct.Struct("<HHHH")  # low and high half of a size or page, flags or more of it, key size
_BRANCH, _LEAF, _VALUE, _META_PAGE = 1, 2, 4, 8  # flags of a page
_OWN_PAGES = 1  # a flag of a node: its value lies on pages of its own
_NO_PAGE = 2**64 - 1  # the root of an empty tree
_DEEPEST = 32  # levels of a tree
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short

# flags of the page; magic, version; address, map size; page size, flags and root of the free list;
# flags and root of the tables; last page, transaction
_META = struct.Struct("<10x H 4x II Q8x IH 34x Q 4xH 34x Q QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = [1 << power for power in range(9, 17)]


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


class Meta(NamedTuple):
    """A meta page: the state of the file after one of its last two transactions."""

    constants: tuple[int, ...]  # what both pages have alike
    page_size: int
    free_root: int
    root: int
    last_page: int
    transaction: int


def read_meta(file: int, offset: int) -> Meta | None:
    """The meta page at an offset; None for any other page. Raises OSError."""
    page = os.pread(file, _META.size, offset)
    if len(page) < _META.size:
        return None
    kind, magic, version, address, page_size, *rest = _META.unpack(page)
    free_flags, free_root, flags, root, last_page, transaction = rest
    known = (magic, version) == (_MAGIC, _VERSION) and page_size in _PAGE_SIZES
    if not known or not kind & _META_PAGE:
        return None
    constants = (kind, address, page_size, free_flags, flags)
    return Meta(constants, page_size, free_root, root, last_page, transaction)


class Entry(NamedTuple):
    """A node of a page: a key, and of a leaf where the value lies, of a branch the page below."""

    key: bytes
    place: Extent
    below: int


class _Page:
    """A page of keys. Raises ValueError where its header is damaged."""

    def __init__(self, data: bytes, number: int) -> None:
        self._data, self.number = data, number
        own, self.kind, lower, self._upper = _PAGE.unpack_from(data)
        least = {_BRANCH: 2, _LEAF: 1}.get(self.kind, len(data))  # nodes
        if own != number or not _HEADER + 2 * least <= lower <= self._upper <= len(data):
            raise ValueError(f"page {number} is damaged")
        self.offsets = struct.unpack_from(f"<{(lower - _HEADER) // 2}H", data, _HEADER)

    def _key(self, offset: int) -> bytes:
        begin = offset + _NODE.size
        return self._data[begin : begin + self._data[offset + 6]]  # no key of ours has 256 bytes

    def below(self, key: bytes) -> int:
        """Of a branch, the page that a key is looked up in. Raises IndexError."""
        # the first node stands for all keys before the second one's
        offset = self.offsets[bisect_right(self.offsets, key, 1, key=self._key) - 1]
        return int.from_bytes(self._data[offset : offset + 6], "little")

    def place(self, key: bytes) -> Extent | None:
        """Of a leaf, where the value of a key lies. Raises ValueError, IndexError."""
        at = bisect_left(self.offsets, key, key=self._key)
        if at == len(self.offsets) or self._key(self.offsets[at]) != key:
            return None
        return self.entry(at).place

    def entry(self, at: int) -> Entry:
        """An entry by its number. Raises ValueError where it is damaged."""
        offset, data = self.offsets[at], self._data
        if self._upper <= offset <= len(data) - _NODE.size:
            low, high, flags, key_size = _NODE.unpack_from(data, offset)
            begin = end = offset + _NODE.size + key_size
            key, size, first = data[begin - key_size : begin], low | high << 16, self.number
            if self.kind == _LEAF and flags & _OWN_PAGES:
                first, begin = int.from_bytes(data[begin : begin + 8], "little"), _HEADER
                end += 8
            elif self.kind == _LEAF:
                end += size
            if end <= len(data):
                return Entry(key, Extent(first * len(data) + begin, size), size | flags << 32)
        raise ValueError(f"page {self.number} is damaged")


class Tree(NamedTuple):
    """The keys under a root page of an open file."""

    file: int
    page_size: int
    root: int

    def find(self, keys: Sequence[bytes]) -> list[Extent | None]:
        """Where the values of keys lie; None for a key that is not there. What leads through a
        damaged page, or beyond the end of the file, is not found. Raises OSError.
        """
        found: dict[bytes, Extent] = {}
        size = os.fstat(self.file).st_size
        level: dict[int, Sequence[bytes]] = {self.root: keys}
        for _ in range(_DEEPEST):
            level = {n: inside for n, inside in level.items() if n < size // self.page_size}
            ask(self.file, [Extent(n * self.page_size, self.page_size) for n in level])
            below: dict[int, list[bytes]] = {}
            for number, inside in level.items():
                with suppress(ValueError, IndexError):
                    page = self._page(number)
                    for key in inside:
                        if page.kind == _BRANCH:
                            below.setdefault(page.below(key), []).append(key)
                        elif (place := page.place(key)) is not None and sum(place) <= size:
                            found[key] = place
            if not below:
                break
            level = dict(below)
        return list(map(found.get, keys))

    def walk(self, *, numbers: bool = False) -> Iterator[Entry]:
        """Every entry in the order of the keys. numbers: keys are little-endian, as those of the
        list of free pages are.

        Raises ValueError where a page of keys, or the beginning of a value on pages of its own, is
        damaged; OSError.
        """
        todo: list[tuple[int, bytes, bytes | None]] = []
        if self.root != _NO_PAGE:
            todo.append((self.root, b"", None))
        seen = set[int]()
        while todo:
            number, low, high = todo.pop()
            if number in seen:
                raise ValueError(f"page {number} is there twice")
            seen.add(number)
            page = self._page(number)
            found = [page.entry(at) for at in range(len(page.offsets))]
            keys = [entry.key[::-1] if numbers else entry.key for entry in found]
            if page.kind == _BRANCH:
                keys[0] = low
            in_order = all(a < b for a, b in pairwise(keys))
            if not in_order or keys[0] < low or (high is not None and keys[-1] >= high):
                raise ValueError(f"page {number} has keys out of order")
            if page.kind == _BRANCH:
                # read at once: LMDB may be led there before this walk is
                below = [self._page(entry.below).number for entry in found]
                todo += reversed(list(zip(below, keys, [*keys[1:], high])))
                continue
            for entry in found:
                if entry.place.offset // self.page_size != number:
                    self._check_begin(entry.place)
                yield entry

    def _page(self, number: int) -> _Page:
        if number >> 48:
            raise ValueError(f"no page {number} can be there")
        data = os.pread(self.file, self.page_size, number * self.page_size)
        if len(data) < self.page_size:
            raise ValueError(f"the file ends before page {number}")
        return _Page(data, number)

    def _check_begin(self, place: Extent) -> None:
        """Is the header before a value on pages of its own right? Raises ValueError."""
        first, needed = place.offset // self.page_size, -(-(_HEADER + place.size) // self.page_size)
        pages = os.fstat(self.file).st_size // self.page_size
        if first <= pages - needed:
            header = os.pread(self.file, _HEADER, first * self.page_size)
            own, kind, taken = _VALUE_PAGE.unpack(header)
            if own == first and kind == _VALUE and needed <= taken <= pages - first:
                return
        raise ValueError(f"page {first} does not begin a value")


def ask(file: int, pieces: Sequence[Extent]) -> None:
    """Have the system begin to read pieces of a file into its page cache, in the file's order;
    neighbours as one.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    start = end = 0
    for offset, size in (*sorted(pieces), Extent(sys.maxsize, 0)):
        page = offset - offset % mmap.PAGESIZE
        if page > end:
            for part in range(start, end, _ASK_BYTES):
                os.posix_fadvise(file, part, min(_ASK_BYTES, end - part), os.POSIX_FADV_WILLNEED)
            start = page
        end = max(end, offset + size + -(offset + size) % mmap.PAGESIZE)
