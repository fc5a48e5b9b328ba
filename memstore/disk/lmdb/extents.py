"""Where values lie in a memory's data file, as LMDB (0.9) lays it out, told without LMDB."""

import ctypes
import mmap
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from memstore.disk.lmdb.pages import (
    BRANCH,
    DEEPEST,
    HEADER,
    LEAF,
    NODE,
    OVERFLOW,
    TABLE_RECORD,
    Page,
)

CAN_ASK = hasattr(os, "posix_fadvise")
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


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
    file: int, page_size: int, table: memoryview, keys: Sequence[bytes]
) -> list[Extent | None]:
    """Where the values of keys lie; None for a key that there is not, and for a value that lies
    beside its key.

    table: how the table of tables describes it. LMDB's own search touches the first page of every
    value that it finds, one after the other. Here only pages of keys are read, and all of a level
    are asked for at once. What leads through a page that is not as it must be is not found. Raises
    OSError.
    """
    if len(table) != TABLE_RECORD.size:
        return [None] * len(keys)
    _, depth, root = TABLE_RECORD.unpack(table)
    end = os.fstat(file).st_size // page_size
    found: dict[bytes, Extent] = {}
    pages = {root: list(keys)}
    for _ in range(min(depth, DEEPEST)):
        pages = {number: inside for number, inside in pages.items() if number < end}
        ask(file, [Extent(number * page_size, page_size) for number in pages])
        below: dict[int, list[bytes]] = {}
        for number, inside in pages.items():
            with suppress(struct.error, IndexError):
                page = Page(os.pread(file, page_size, number * page_size))
                _look_up(page, page_size, inside, below, found)
        pages = below
    return [found.get(key) for key in keys]


def _look_up(
    page: Page,
    page_size: int,
    keys: Sequence[bytes],
    below: dict[int, list[bytes]],
    found: dict[bytes, Extent],
) -> None:
    """Look keys up in one page: into `below` go the pages that a branch leads to, into `found` the
    places in a leaf.
    """
    nodes = page.offsets
    for key in keys:
        if page.flags & BRANCH:  # its first node stands for all keys before the second one's
            node = page.node_at(nodes[bisect_right(nodes, key, 1, key=page.key_at) - 1])
            if node is not None:
                below.setdefault(node.page, []).append(key)
        elif page.flags & LEAF:
            at = bisect_left(nodes, key, key=page.key_at)
            node = page.node_at(nodes[at]) if at < len(nodes) else None
            if node is not None and node.key == key and node.flags & OVERFLOW:
                found[key] = Extent(node.page * page_size + HEADER, node.size)


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
