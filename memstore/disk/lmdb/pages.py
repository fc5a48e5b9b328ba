"""Reads pages of LMDB's data file (0.9) without LMDB: the two meta pages, the key trees, and the
positions of values.

LMDB's Python binding touches every page of a value in turn, and LMDB may end the process on a
damaged key page or a disk error. Here such a page is an error.
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
_PAGE = struct.Struct("<Q2xHHH")  # number, flags, end of the offsets of nodes, start of the nodes
_VALUE_PAGE = struct.Struct("<Q2xHI")  # number, flags, pages of the value
# low and middle 16 bits of a size or page, flags or its high 16 bits, key size
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _VALUE, _META_PAGE = 1, 2, 4, 8  # flags of a page
_OWN_PAGES = 1  # flag of a node: its value is on separate (overflow) pages
_NO_PAGE = 2**64 - 1  # the root of an empty tree
_DEEPEST = 32  # levels of a tree
_ASK_BYTES = 1 << 17  # bytes of one hint: the system may truncate longer ones

# flags of the page; magic, version; address, map size; page size, flags and root of the free list;
# flags and root of the tables; last page, transaction
_META = struct.Struct("<10x H 4x II Q8x IH 34x Q 4xH 34x Q QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = [1 << power for power in range(9, 17)]


class Extent(NamedTuple):
    """The place of a value in the data file, in bytes."""

    offset: int
    size: int


class Meta(NamedTuple):
    """A meta page: the state of the file after one of its last two transactions."""

    constants: tuple[int, ...]  # fields that are equal on both pages
    page_size: int
    free_root: int
    root: int
    last_page: int
    transaction: int


def read_meta(file: int, offset: int) -> Meta | None:
    """The meta page at an offset; None if it is invalid. Raises OSError."""
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
    """A key in a page, with its value's position (in a leaf) or its child page (in a branch)."""

    key: bytes
    place: Extent
    below: int


class _Page:
    """A key page. Raises ValueError if its header is damaged."""

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
        """The child page of a branch page that leads to a key. Raises IndexError."""
        # the first node covers all keys before the second node's
        offset = self.offsets[bisect_right(self.offsets, key, 1, key=self._key) - 1]
        return int.from_bytes(self._data[offset : offset + 6], "little")

    def place(self, key: bytes) -> Extent | None:
        """The position of a key's value in a leaf page. Raises ValueError, IndexError."""
        at = bisect_left(self.offsets, key, key=self._key)
        if at == len(self.offsets) or self._key(self.offsets[at]) != key:
            return None
        return self.entry(at).place

    def entry(self, at: int) -> Entry:
        """An entry by its number. Raises ValueError if it is damaged."""
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
    """The key tree under a root page of an open file."""

    file: int
    page_size: int
    root: int

    def find(self, keys: Sequence[bytes]) -> list[Extent | None]:
        """The positions of the values of keys; None for a missing key, and if a damaged page or the
        end of the file makes it unreachable. Raises OSError.
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
        """Every entry in the order of the keys. numbers: keys are little-endian, as in the list of
        free pages.

        Raises ValueError for a damaged key page or a damaged header of an overflow value; OSError.
        """
        todo: list[tuple[int, bytes, bytes | None]] = []
        if self.root != _NO_PAGE:
            todo.append((self.root, b"", None))
        seen = set[int]()
        while todo:
            number, low, high = todo.pop()
            if number in seen:
                raise ValueError(f"page {number} occurs twice")
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
                # check the children at once: a concurrent LMDB may reach them before this walk
                below = [self._page(entry.below).number for entry in found]
                todo += reversed(list(zip(below, keys, [*keys[1:], high])))
                continue
            for entry in found:
                if entry.place.offset // self.page_size != number:
                    self._check_begin(entry.place)
                yield entry

    def _page(self, number: int) -> _Page:
        if number >> 48:
            raise ValueError(f"page {number} cannot exist")
        data = os.pread(self.file, self.page_size, number * self.page_size)
        if len(data) < self.page_size:
            raise ValueError(f"the file ends before page {number}")
        return _Page(data, number)

    def _check_begin(self, place: Extent) -> None:
        """Check the header of an overflow value. Raises ValueError."""
        first, needed = place.offset // self.page_size, -(-(_HEADER + place.size) // self.page_size)
        pages = os.fstat(self.file).st_size // self.page_size
        if first <= pages - needed:
            header = os.pread(self.file, _HEADER, first * self.page_size)
            own, kind, taken = _VALUE_PAGE.unpack(header)
            if own == first and kind == _VALUE and needed <= taken <= pages - first:
                return
        raise ValueError(f"page {first} does not begin a value")


def ask(file: int, pieces: Sequence[Extent]) -> None:
    """Ask the system to read pieces of a file into its page cache, in file order, adjacent pieces
    together.
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
