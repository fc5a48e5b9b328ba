"""Pages of keys of a data file as LMDB (0.9) lays them out, read without LMDB, and checked: a
damaged one may end the process in which LMDB reads it.
"""

import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from memstore.disk.lmdb.pages import BRANCH, NODE, OVERFLOW, PAGE, PAGE_HEADER, Extent

NO_PAGE = 2**64 - 1  # the root of an empty tree
_LEAF, _VALUE = 2, 4  # flags of pages
_VALUE_PAGE = struct.Struct("<Q2xHI")  # number, flags, pages that the value takes


class Entry(NamedTuple):
    """A key, and where in the file its value lies."""

    key: bytes
    flags: int
    place: Extent


class _Page(NamedTuple):
    keys: list[bytes]
    below: list[int]  # of a branch the pages that it leads to
    entries: list[Entry]  # of a leaf


def entries(file: int, page_size: int, root: int, *, numbers: bool = False) -> Iterator[Entry]:
    """Every entry under a root page, in the order of the keys. numbers: keys are little-endian, as
    those of the list of free pages are.

    Raises ValueError where a page of keys, or the beginning of a value on pages of its own, is not
    whole or not in its place; OSError.
    """
    pages = os.fstat(file).st_size // page_size
    todo = list[tuple[int, bytes, bytes | None]]()
    seen = set[int]()
    if root != NO_PAGE:
        _check_header(file, page_size, pages, root)
        todo.append((root, b"", None))
    while todo:
        number, low, high = todo.pop()
        if number in seen:
            raise ValueError(f"page {number} is there twice")
        seen.add(number)
        page = _page(os.pread(file, page_size, number * page_size), number)
        keys = [key[::-1] for key in page.keys] if numbers else page.keys
        if page.below:
            keys[0] = low  # the first node stands for all keys before the second one's
        in_order = all(a < b for a, b in pairwise(keys))
        if not in_order or keys[0] < low or (high is not None and keys[-1] >= high):
            raise ValueError(f"page {number} has keys out of order")
        for below in page.below:  # at once: LMDB may be led there before this walk is
            _check_header(file, page_size, pages, below)
        todo += reversed(list(zip(page.below, keys, [*keys[1:], high])))
        for entry in page.entries:
            if entry.flags & OVERFLOW:
                _check_begin(file, page_size, pages, entry.place)
            yield entry


def _page(data: bytes, number: int) -> _Page:
    """What a page of keys holds: one node at least. Raises ValueError."""
    damaged = ValueError(f"page {number} is damaged")
    page = _Page([], [], [])
    try:
        own, kind, lower, upper = PAGE.unpack_from(data)
        if own != number or kind not in (BRANCH, _LEAF) or not PAGE_HEADER < lower <= upper:
            raise damaged
        for (offset,) in struct.iter_unpack("<H", data[PAGE_HEADER:lower]):
            low, high, flags, key_size = NODE.unpack_from(data, offset)
            begin = end = offset + NODE.size + key_size
            key, size = data[begin - key_size : begin], low | high << 16
            page.keys.append(key)
            if kind == BRANCH:
                page.below.append(size | flags << 32)
            else:
                place = number * len(data) + begin
                if flags & OVERFLOW:
                    (first,) = struct.unpack_from("<Q", data, begin)
                    place = first * len(data) + PAGE_HEADER
                else:
                    end += size
                page.entries.append(Entry(key, flags, Extent(place, size)))
            if offset < upper or end > len(data):
                raise damaged
    except struct.error:
        raise damaged from None
    return page


def _check_header(file: int, page_size: int, pages: int, number: int) -> None:
    """Does a page of keys begin there? Raises ValueError."""
    if 2 <= number < pages:
        own, kind, *_ = PAGE.unpack(os.pread(file, PAGE.size, number * page_size))
        if own == number and kind in (BRANCH, _LEAF):
            return
    raise ValueError(f"no page {number} of keys can be there")


def _check_begin(file: int, page_size: int, pages: int, place: Extent) -> None:
    """Is what stands before a value on pages of its own right? Raises ValueError."""
    first, needed = place.offset // page_size, -(-(PAGE_HEADER + place.size) // page_size)
    if 2 <= first <= pages - needed:
        own, kind, taken = _VALUE_PAGE.unpack(os.pread(file, PAGE_HEADER, first * page_size))
        if own == first and kind == _VALUE and needed <= taken <= pages - first:
            return
    raise ValueError(f"page {first} does not begin a value")


def value_of(file: int, entry: Entry) -> bytes:
    """The value of an entry. Raises OSError."""
    return os.pread(file, entry.place.size, entry.place.offset)
