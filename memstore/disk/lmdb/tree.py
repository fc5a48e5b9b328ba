"""The trees of a data file as LMDB (0.9) lays them out, read page by page without LMDB: a damaged
page, over which LMDB would end the process, is one of which nothing is found.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

_HEADER = 16  # bytes of a page's header
_BRANCH, _LEAF, _OVERFLOW_PAGE = 1, 2, 4  # flags of pages
_OVERFLOW, TABLE = 1, 2  # flags of nodes: the value lies on pages of its own; it tells of a table
_NODE = struct.Struct("<HHHH")
NO_PAGE = 2**64 - 1


class Node(NamedTuple):
    """An entry of a leaf, or what a branch says of a page below."""

    key: bytes
    flags: int  # of a leaf's
    page: int  # below; of a leaf's value that lies on pages of its own, the first of them
    size: int  # of the value
    value: bytes  # where it lies in the leaf itself


class Tree:
    """The trees of one file. Raises OSError."""

    def __init__(self, file: int, page_size: int) -> None:
        self._file, self._page_size = file, page_size
        self.pages = os.fstat(file).st_size // page_size

    def entries(self, root: int) -> Iterator[tuple[bytes, int, bytes]]:
        """Key, flags and value of whatever is found under a root page, in order where nothing is
        damaged. What it gives may be damaged, too.
        """
        todo, seen = [root], set()
        while todo:
            number = todo.pop()
            if number in seen or not 2 <= number < self.pages:
                continue
            seen.add(number)
            flags, nodes = self._nodes(number)
            if flags & _BRANCH:
                todo += [node.page for node in reversed(nodes)]
                continue
            for node in nodes:
                value = node.value
                if node.flags & _OVERFLOW:
                    begin = node.page * self._page_size + _HEADER
                    if begin + node.size > self.pages * self._page_size:
                        continue
                    value = os.pread(self._file, node.size, begin)
                yield node.key, node.flags & ~_OVERFLOW, value

    def tables(self, root: int) -> dict[str, int]:
        """The root pages of the tables that the table of tables tells of."""
        found = {}
        for key, flags, value in self.entries(root):
            if flags == TABLE:
                with suppress(struct.error, UnicodeDecodeError):
                    found[key.decode()] = struct.unpack_from("<40xQ", value)[0]
        return found

    def is_leaf(self, number: int) -> bool:
        """Does a page say that it is one of entries?"""
        page = os.pread(self._file, _HEADER, number * self._page_size)
        own, flags = struct.unpack_from("<Q2xH", page)
        return bool(own == number and flags == _LEAF)

    def is_sound(self, root: int, *, numbers: bool = False) -> bool:
        """Is every page of keys under a root page, and the beginning of every value on pages of its
        own, whole and in its place? numbers: keys are little-endian (the list of free pages).
        """
        if root == NO_PAGE:
            return True
        todo: list[tuple[int, bytes, bytes | None]] = [(root, b"", None)]
        seen = set()
        while todo:
            number, low, high = todo.pop()
            if number in seen or not 2 <= number < self.pages:
                return False
            seen.add(number)
            own, flags, lower, upper = struct.unpack_from("<Q2xHHH", self._page(number))
            _, nodes = self._nodes(number)
            keys = [node.key[:: -1 if numbers else 1] for node in nodes]
            if flags == _BRANCH and keys:
                keys[0] = low  # the first stands for all before the second
            if (
                own != number
                or flags not in (_BRANCH, _LEAF)
                or not lower <= upper <= self._page_size
                or not 0 < len(nodes) == (lower - _HEADER) // 2
                or not all(a < b for a, b in pairwise(keys))
                or keys[0] < low
                or (high is not None and keys[-1] >= high)
            ):
                return False
            if flags == _BRANCH:
                todo += zip([node.page for node in nodes], keys, [*keys[1:], high])
            elif not all(map(self._is_begun, nodes)):
                return False
        return True

    def _is_begun(self, node: Node) -> bool:
        """Is what stands before a value on pages of its own right?"""
        if not node.flags & _OVERFLOW:
            return True
        page = os.pread(self._file, _HEADER, node.page * self._page_size)
        pages = -(-(_HEADER + node.size) // self._page_size)
        right = node.page >= 2 and node.page + pages <= self.pages
        return right and struct.unpack("<Q2xHI", page) == (node.page, _OVERFLOW_PAGE, pages)

    def _page(self, number: int) -> bytes:
        return os.pread(self._file, self._page_size, number * self._page_size)

    def _nodes(self, number: int) -> tuple[int, list[Node]]:
        """A page's flags, and those of its nodes that lie inside it."""
        page = self._page(number)
        flags, lower = struct.unpack_from("<HH", page, 10)
        count = max(0, min(lower, len(page)) - _HEADER) // 2
        nodes = []
        for at in struct.unpack_from(f"<{count}H", page, _HEADER):
            if at < _HEADER or at + _NODE.size > len(page):
                continue
            low, high, more, key_size = _NODE.unpack_from(page, at)
            begin = at + _NODE.size + key_size
            key = page[at + _NODE.size : begin]
            if flags & _BRANCH:
                if begin <= len(page):
                    nodes.append(Node(key, 0, low | high << 16 | more << 32, 0, b""))
                continue
            size = low | high << 16
            if more & _OVERFLOW:
                if begin + 8 <= len(page):
                    (first,) = struct.unpack_from("<Q", page, begin)
                    nodes.append(Node(key, more, first, size, b""))
            elif begin + size <= len(page):
                nodes.append(Node(key, more, 0, size, page[begin : begin + size]))
        return flags, nodes
