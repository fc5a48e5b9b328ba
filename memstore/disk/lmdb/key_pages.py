"""Pages of keys of a data file as LMDB (0.9) lays them out, read without LMDB, and checked: a
damaged one may end the process in which LMDB reads it.
"""

import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from memstore.disk.lmdb.pages import BRANCH, NODE, OVERFLOW, PAGE, PAGE_HEADER, TABLE_RECORD, Extent

NO_PAGE = 2**64 - 1  # the root of an empty tree
TABLE = 2  # a flag of an entry: its value tells of a table
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
    todo: list[tuple[int, bytes, bytes | None]] = [] if root == NO_PAGE else [(root, b"", None)]
    seen = set[int]()
    while todo:
        number, low, high = todo.pop()
        if number in seen or not 2 <= number < pages:
            raise ValueError(f"no page {number} can be there")
        seen.add(number)
        page = _page(os.pread(file, page_size, number * page_size), number)
        keys = [key[::-1] for key in page.keys] if numbers else page.keys
        if page.below:
            keys[0] = low  # the first node stands for all keys before the second one's
        in_order = all(a < b for a, b in pairwise(keys))
        if not in_order or keys[0] < low or (high is not None and keys[-1] >= high):
            raise ValueError(f"page {number} has keys out of order")
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


def table_of(file: int, entry: Entry) -> int:
    """The root page of the table that an entry tells of. Raises ValueError, OSError."""
    value = value_of(file, entry)
    if entry.flags != TABLE or len(value) != TABLE_RECORD.size:
        raise ValueError(f"the entry {entry.key!r} is not a table's")
    root: int = TABLE_RECORD.unpack(value)[0]
    return root
