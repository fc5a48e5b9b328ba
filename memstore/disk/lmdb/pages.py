"""Pages of keys of a data file as LMDB (0.9) lays them out, read without LMDB, and where values
lie: a damaged page, over which LMDB would end the process, is one of which nothing is found.
"""

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Sequence
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


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


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
