"""Pages of keys of a data file as LMDB (0.9) lays them out, read without LMDB, and where values
lie: a damaged page, over which LMDB would end the process, is one of which nothing is found.
"""

import ctypes
import mmap
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import repeat
from typing import NamedTuple

import numpy as np

HEADER = 16  # bytes of a page's header
BRANCH, LEAF, OVERFLOW_PAGE = 1, 2, 4  # flags of pages
OVERFLOW, TABLE = 1, 2  # flags of nodes: the value lies on pages of its own; it tells of a table
NO_PAGE = 2**64 - 1
DEEPEST = 32  # levels of a tree
PAGE = struct.Struct("<Q2xHHH")  # number, flags, end of the nodes' offsets, begin of the nodes
NODE = struct.Struct("<HHHH")  # low and high half of a size or page, flags or more of it, key size
# flags, depth and root page of a table, as the table of tables has it
TABLE_RECORD = struct.Struct("<4xHH 32x Q")


class Node(NamedTuple):
    """An entry of a leaf, or what a branch says of a page below."""

    key: bytes
    flags: int  # of a leaf's
    page: int  # below; of a leaf's value that lies on pages of its own, the first of them
    size: int  # of the value
    value: bytes  # where it lies in the leaf itself


class Page:
    """One page of keys, or what stands in its place."""

    def __init__(self, data: bytes) -> None:
        """Raises struct.error for what is too short for a page."""
        self.number, self.flags, self.lower, self.upper = PAGE.unpack_from(data)
        self._data = data
        count = max(0, min(self.lower, len(data)) - HEADER) // 2
        self.offsets: tuple[int, ...] = struct.unpack_from(f"<{count}H", data, HEADER)

    def node_at(self, offset: int) -> Node | None:
        """The node there; None for one that does not lie inside the page."""
        page = self._data
        if offset < HEADER or offset + NODE.size > len(page):
            return None
        low, high, more, key_size = NODE.unpack_from(page, offset)
        begin = offset + NODE.size + key_size
        key = page[offset + NODE.size : begin]
        if self.flags & BRANCH:
            below = low | high << 16 | more << 32
            return Node(key, 0, below, 0, b"") if begin <= len(page) else None
        size = low | high << 16
        if more & OVERFLOW:
            if begin + 8 > len(page):
                return None
            (first,) = struct.unpack_from("<Q", page, begin)
            return Node(key, more, first, size, b"")
        if begin + size > len(page):
            return None
        return Node(key, more, 0, size, page[begin : begin + size])

    def nodes(self) -> list[Node]:
        """Those of its nodes that lie inside it, in order of their keys."""
        found = map(self.node_at, self.offsets)
        return [node for node in found if node is not None]


_MOST = 1024  # pages that are kept: of some 20 kB
_OFTEN = 2  # keys that are searched for in a leaf before it is taken apart


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


class KeyPage:
    """A page of keys, of one length all, that is looked into more than once."""

    def __init__(self, data: bytes) -> None:
        """Raises struct.error for what is too short for a page."""
        page = Page(data)
        self.is_branch, self.is_leaf = bool(page.flags & BRANCH), bool(page.flags & LEAF)
        self._data, self._offsets = data, page.offsets
        self._searched = 0
        self._branches: tuple[list[bytes], list[int]] | None = None

    def below(self, key_size: int) -> tuple[list[bytes], list[int]]:
        """Of a branch the least keys of its pages, and their numbers; the first stands for all keys
        before the second. Raises struct.error.
        """
        if self._branches is None:
            nodes = [NODE.unpack_from(self._data, offset) for offset in self._offsets]
            self._branches = (
                list(map(_key_at(self._data, key_size), self._offsets)),
                [low | high << 16 | more << 32 for low, high, more, _ in nodes],
            )
        return self._branches

    def extents(self, key: bytes, page_size: int) -> dict[bytes, Extent]:
        """Of a leaf by key the place of this value, if it is there and does not lie beside its key;
        of a leaf that is looked into often, of all its values. Raises struct.error.
        """
        padded = self._data + bytes(8)  # behind a value that lies beside its key
        unpack = _leaf_node(len(key)).unpack_from
        self._searched += 1
        if self._searched > _OFTEN:
            nodes = map(unpack, repeat(padded), self._offsets)
        else:
            at = bisect_left(self._offsets, key, key=_key_at(padded, len(key)))
            nodes = map(unpack, repeat(padded), self._offsets[at : at + 1])
        return {
            name: Extent(page * page_size + HEADER, low | high << 16)
            for low, high, flags, key_size, name, page in nodes
            if flags & OVERFLOW and key_size == len(key)
        }


def _key_at(data: bytes, size: int) -> Callable[[int], bytes]:
    """The key, of so many bytes, of the node at an offset."""
    begin, end = NODE.size, NODE.size + size
    return lambda offset: data[offset + begin : offset + end]


@cache
def _leaf_node(key_size: int) -> struct.Struct:
    return struct.Struct(f"<HHHH{key_size}sQ")


class Known(NamedTuple):
    """What is known of one table."""

    pages: dict[int, KeyPage]  # by number
    extents: dict[bytes, Extent]  # by key


class KeyPages:
    """The pages of keys of one file that were looked into, of its latest state alone. Safe for
    several threads.
    """

    def __init__(self) -> None:
        self._latest: tuple[int, dict[str, Known]] = -1, {}

    def of(self, transaction: int, table: str) -> Known:
        """Those of a table in the state that a transaction of this number made: while a reader sees
        it, nothing changes them.
        """
        made, tables = self._latest
        if made != transaction:
            tables = {}
            self._latest = transaction, tables
        known = tables.get(table)
        if known is None or len(known.pages) > _MOST:
            known = tables[table] = Known({}, {})
        return known


CAN_ASK = hasattr(os, "posix_fadvise")
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short


def extent_of(key: memoryview, page_size: int) -> Extent | None:
    """Where the value of a key lies; None if it lies beside the key.

    key: where LMDB shows it, in a mapped tree page: what surrounds it is the node that says where
    its value is.
    """
    address = np.frombuffer(key, dtype=np.uint8).__array_interface__["data"][0]
    low, high, flags, size = NODE.unpack(ctypes.string_at(address - NODE.size, NODE.size))
    if size != len(key) or not flags & OVERFLOW:
        return None
    page = ctypes.c_uint64.from_address(address + size).value
    return Extent(page * page_size + HEADER, low | high << 16)


def extents_of(
    file: int, page_size: int, table: memoryview, keys: Sequence[bytes], known: Known
) -> list[Extent | None]:
    """Where the values of keys of one length lie; None for a key that there is not, and for a value
    that lies beside its key.

    table: how the table of tables describes it; known: of it in this state of the file, to which
    what is read is added. LMDB's own search touches the first page of every value that it finds,
    one after the other. Here only pages of keys are read, and all of a level are asked for at once.
    What leads through a page that is not as it must be is not found. Raises OSError.
    """
    found = known.extents
    extents = list(map(found.get, keys))
    if None not in extents or len(table) != TABLE_RECORD.size:
        return extents
    _, depth, root = TABLE_RECORD.unpack(table)
    end = os.fstat(file).st_size
    level = {root: [key for key, extent in zip(keys, extents) if extent is None]}
    for _ in range(min(depth, DEEPEST)):
        new = [number for number in level if number not in known.pages]
        if new:
            _keep(file, page_size, new, known.pages)
        below: dict[int, list[bytes]] = {}
        for number, inside in level.items():
            page = known.pages.get(number)
            if page is not None:
                _look_up(page, page_size, end, inside, below, found)
        level = below
    return list(map(found.get, keys))


def _keep(file: int, page_size: int, numbers: list[int], kept: dict[int, KeyPage]) -> None:
    """Read pages of keys, of which all are asked for at once."""
    end = os.fstat(file).st_size // page_size
    numbers = [number for number in numbers if number < end]
    ask(file, [Extent(number * page_size, page_size) for number in numbers])
    for number in numbers:
        with suppress(struct.error):
            kept[number] = KeyPage(os.pread(file, page_size, number * page_size))


def _look_up(
    page: KeyPage,
    page_size: int,
    end: int,
    keys: Sequence[bytes],
    below: dict[int, list[bytes]],
    found: dict[bytes, Extent],
) -> None:
    """Look keys up in one page: into `below` go the pages that a branch leads to, into `found` the
    places in a leaf, which end where the file does, at `end`.
    """
    try:
        if page.is_branch:
            least, numbers = page.below(len(keys[0]))
            for key in keys:
                below.setdefault(numbers[bisect_right(least, key, 1) - 1], []).append(key)
        elif page.is_leaf:
            for key in keys:
                if key not in found:
                    places = page.extents(key, page_size).items()
                    found.update((name, at) for name, at in places if at.offset + at.size <= end)
    except (struct.error, IndexError):
        pass  # the rest of its keys is not found


def ask(file: int, pieces: Sequence[Extent]) -> None:
    """Have the system begin to read pieces of a file into its page cache, in the file's order;
    neighbours as one.
    """
    if not CAN_ASK:
        return
    start = end = 0
    for offset, size in (*sorted(pieces), Extent(sys.maxsize, 0)):
        page = offset - offset % mmap.PAGESIZE
        if page > end:
            for part in range(start, end, _ASK_BYTES):
                os.posix_fadvise(file, part, min(_ASK_BYTES, end - part), os.POSIX_FADV_WILLNEED)
            start = page
        end = max(end, offset + size + -(offset + size) % mmap.PAGESIZE)
