"""The trees of a data file as LMDB (0.9) lays them out, read page by page without LMDB."""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

from memstore.disk.lmdb.pages import (
    BRANCH,
    DEEPEST,
    HEADER,
    LEAF,
    NO_PAGE,
    OVERFLOW,
    OVERFLOW_PAGE,
    PAGE,
    TABLE,
    TABLE_RECORD,
    Node,
    Page,
)


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
            page = self.page(number)
            if page.flags & BRANCH:
                todo += [node.page for node in reversed(page.nodes())]
                continue
            for node in page.nodes():
                value = node.value
                if node.flags & OVERFLOW:
                    begin = node.page * self._page_size + HEADER
                    if begin + node.size > self.pages * self._page_size:
                        continue
                    value = os.pread(self._file, node.size, begin)
                yield node.key, node.flags & ~OVERFLOW, value

    def tables(self, root: int) -> dict[str, int]:
        """The root pages of the tables that the table of tables tells of."""
        found = {}
        for key, flags, value in self.entries(root):
            if flags == TABLE:
                with suppress(struct.error, UnicodeDecodeError):
                    found[key.decode()] = TABLE_RECORD.unpack(value)[2]
        return found

    def find(self, root: int, key: bytes) -> Node | None:
        """The entry of a key under a root page; None where there is none. Raises ValueError and
        struct.error where a page on the way is not as it must be.
        """
        number = root
        if number == NO_PAGE:
            return None
        for _ in range(DEEPEST):
            if not 2 <= number < self.pages:
                raise ValueError(f"there is no page {number}")
            page = self.page(number)
            known = page.flags & (BRANCH | LEAF)
            if page.number != number or not known or not HEADER <= page.lower <= self._page_size:
                raise ValueError(f"page {number} is damaged")
            nodes = page.nodes()
            if len(nodes) < len(page.offsets):
                raise ValueError(f"page {number} is damaged")
            if page.flags & LEAF:
                return next((node for node in nodes if node.key == key), None)
            if not nodes:
                return None
            # a branch's first node stands for all keys before the second one's
            number = [node for node in nodes if node is nodes[0] or node.key <= key][-1].page
        raise ValueError("its pages lead round in circles")

    def is_leaf(self, number: int) -> bool:
        """Does a page say that it is one of entries?"""
        page = os.pread(self._file, HEADER, number * self._page_size)
        own, flags, _, _ = PAGE.unpack(page)
        return bool(own == number and flags == LEAF)

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
            page = self.page(number)
            nodes = page.nodes()
            keys = [node.key[:: -1 if numbers else 1] for node in nodes]
            if page.flags == BRANCH and keys:
                keys[0] = low  # the first stands for all before the second
            if (
                page.number != number
                or page.flags not in (BRANCH, LEAF)
                or not page.lower <= page.upper <= self._page_size
                or not 0 < len(nodes) == (page.lower - HEADER) // 2
                or not all(a < b for a, b in pairwise(keys))
                or keys[0] < low
                or (high is not None and keys[-1] >= high)
            ):
                return False
            if page.flags == BRANCH:
                todo += zip([node.page for node in nodes], keys, [*keys[1:], high])
            elif not all(map(self._is_begun, nodes)):
                return False
        return True

    def _is_begun(self, node: Node) -> bool:
        """Is what stands before a value on pages of its own right?"""
        if not node.flags & OVERFLOW:
            return True
        page = os.pread(self._file, HEADER, node.page * self._page_size)
        pages = -(-(HEADER + node.size) // self._page_size)
        right = node.page >= 2 and node.page + pages <= self.pages
        return right and struct.unpack("<Q2xHI", page) == (node.page, OVERFLOW_PAGE, pages)

    def page(self, number: int) -> Page:
        """The page of a number."""
        return Page(os.pread(self._file, self._page_size, number * self._page_size))
