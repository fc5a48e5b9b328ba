"""A page of keys of a data file as LMDB (0.9) lays it out, read without LMDB: a damaged page, over
which LMDB would end the process, is one of which nothing is found.
"""

import struct
from typing import NamedTuple

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
