"""The two pages that a data file of LMDB (0.9) begins with, each of which tells one of the last two
transactions: is the file as long as they say, and are they what was written.

LMDB keeps no checksum of them, and opens whichever says the greater number. One flipped bit there
would undo a commit; the record that every commit of ours leaves, with a checksum, tells.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
from memstore.disk.lmdb.transaction import COMMIT_KEY, COMMIT_TABLE, Commit
from memstore.errors import CorruptMemory, MemoryNotFound


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


class _Meta(NamedTuple):
    constants: tuple[int, ...]  # what both pages have alike
    page_size: int
    map_size: int
    free_root: int
    root: int  # of the table of tables
    last_page: int
    transaction: int


# flags of the page; magic, version; address, map size; page size, flags and root of the free list;
# flags and root of the table of tables; last page, transaction
_META = struct.Struct("<10x H 4x II QQ IH 34x Q 4xH 34x Q QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = 8  # a page's flag
_PAGE_SIZES = [1 << power for power in range(9, 17)]


def _read_metas(file: int) -> list[_Meta]:
    """The file's two meta pages, read without mapping it, in their order; fewer where one is
    none.
    """
    metas = []
    offset = 0
    for _ in range(2):
        page = os.pread(file, _META.size, offset)
        if len(page) == _META.size:
            (
                kind,
                magic,
                version,
                address,
                map_size,
                page_size,
                free_flags,
                free_root,
                flags,
                root,
                last_page,
                transaction,
            ) = _META.unpack(page)
            right = magic == _MAGIC and version == _VERSION and kind & _META_PAGE
            if right and page_size in _PAGE_SIZES:
                constants = (kind, address, page_size, free_flags, flags)
                metas.append(
                    _Meta(constants, page_size, map_size, free_root, root, last_page, transaction)
                )
        offset = metas[0].page_size if metas else os.sysconf("SC_PAGE_SIZE")
    return metas


class States(NamedTuple):
    """What is left of the file's meta pages."""

    page_size: int
    # root pages of the table of tables that they name, whatever else is wrong with them -> the
    # transaction that they tell of, None where they are not understood
    roots: dict[int, int | None]
    newest: int  # of those
    free_root: int  # of its list of free pages


def read_states(file: int) -> States:
    """What both meta pages tell. Raises OSError."""
    metas = _read_metas(file)
    page_size = metas[0].page_size if metas else os.sysconf("SC_PAGE_SIZE")
    roots: dict[int, int | None] = {meta.root: meta.transaction for meta in metas}
    for offset in (0, page_size):
        with suppress(struct.error):
            roots.setdefault(_META.unpack(os.pread(file, _META.size, offset))[9], None)
    newest = max(metas, key=lambda meta: meta.transaction, default=None)
    if newest is None:
        return States(page_size, roots, NO_PAGE, NO_PAGE)
    return States(page_size, roots, newest.root, newest.free_root)


def check_length(path: Path, file: int) -> int:
    """Refuse a file that ends before a page in use, which would end the interpreter once mapped;
    return its map size.

    Pages at the end that LMDB took and freed in one transaction were never written: a file may lack
    those. Raises CorruptMemory, MemoryNotFound.
    """
    size = os.fstat(file).st_size
    if not size:
        raise MemoryNotFound(
            f"{path.parent} holds no memory ({path.name} is empty); create it again"
        )
    metas = _read_metas(file)
    if not metas:
        raise CorruptMemory(
            f"{path} is not a memory's data file, or its beginning is damaged; restore it from a "
            "copy"
        )
    meta = max(metas, key=lambda meta: meta.transaction)
    size = os.fstat(file).st_size  # not before the meta page: another process may be writing
    pages = size // meta.page_size
    missing = meta.last_page + 1 - pages
    if missing > 0:
        free = _free_pages(file, meta)
        if free is None or sum(pages <= page <= meta.last_page for page in free) != missing:
            raise CorruptMemory(
                f"{path} is truncated: {size} bytes instead of "
                f"{(meta.last_page + 1) * meta.page_size}; "
                "restore it from a copy"
            )
    return meta.map_size


def check_commits(path: Path, file: int) -> None:
    """Refuse a file whose meta pages are not those of its last two transactions.

    A transaction's number is even on the first page and odd on the second, one apart from the
    other's, and the same as in the record of the commit that is found from there. Raises
    CorruptMemory.
    """
    metas = _read_metas(file)
    while (wrong := _what_is_wrong(file, metas)) is not None:
        before, metas = metas, _read_metas(file)
        if metas == before:  # no other process has committed meanwhile
            raise CorruptMemory(
                f"{path}: {wrong}: the last commit could be undone without a word; run verify "
                "--repair"
            )


def _what_is_wrong(file: int, metas: list[_Meta]) -> str | None:
    if len(metas) < 2:
        return "one of its two meta pages is damaged"
    first, second = metas
    if first.constants != second.constants:
        return "its two meta pages differ in what never changes"
    numbers = (first.transaction, second.transaction)
    if numbers == (0, 0):
        return None  # nothing was committed yet
    if numbers[0] % 2 or not numbers[1] % 2 or abs(numbers[0] - numbers[1]) != 1:
        return f"its meta pages tell of transactions {numbers[0]} and {numbers[1]}"
    older, newer = sorted(metas, key=lambda meta: meta.transaction)
    if newer.last_page < older.last_page:  # a file only grows
        return f"its meta pages tell of last pages {older.last_page} and {newer.last_page}"
    recorded = []
    for meta in (older, newer):
        if not meta.transaction:
            if (meta.root, meta.free_root) != (NO_PAGE, NO_PAGE):
                return "a meta page of transaction 0 tells of pages"
            continue
        try:
            record = _commit_record(file, meta)
        except (ValueError, struct.error) as error:
            return f"transaction {meta.transaction} cannot be read ({error})"
        if record is not None:
            known = Commit.unpack(record)
            if known is None or known.transaction != meta.transaction:
                what = "damaged" if known is None else known.transaction
                return f"transaction {meta.transaction} is recorded as {what}"
        recorded.append(record is not None)
    # a memory of an older format, which its own row tells, may have records of none of them
    if recorded == [True, False]:
        return f"transaction {max(numbers)} is not recorded"
    return None


def _commit_record(file: int, meta: _Meta) -> bytes | None:
    """The record of the commit that a meta page tells of, None if it has none. Raises ValueError
    and struct.error where a page is not as it must be.
    """
    tree = Tree(file, meta.page_size)
    description = _beside(tree, meta.root, COMMIT_TABLE.encode(), TABLE)
    if description is None:
        return None
    return _beside(tree, TABLE_RECORD.unpack(description)[2], COMMIT_KEY, 0)


def _beside(tree: Tree, root: int, key: bytes, kind: int) -> bytes | None:
    """The value of a key, which has to lie beside it; None where there is none. Raises as find
    does.
    """
    node = tree.find(root, key)
    if node is not None and node.flags != kind:
        raise ValueError(f"the entry {key.decode()} is of another kind")
    return None if node is None else node.value


def _free_pages(file: int, meta: _Meta) -> set[int] | None:
    """Numbers of the file's free pages; None if their list is not whole."""
    tree, free = Tree(file, meta.page_size), set[int]()
    if not tree.is_sound(meta.free_root, numbers=True):
        return None
    for _, _, value in tree.entries(meta.free_root):
        if len(value) % 8:
            return None
        # the first says how many follow
        free.update(np.frombuffer(value, dtype="<u8")[1:].tolist())
    return free
