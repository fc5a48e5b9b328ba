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

CAN_ASK = hasattr(os, "posix_fadvise")
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short


class Place(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


_NODE = struct.Struct("<HHHH")
_OVERFLOW = 1  # a node's flag: its value lies on pages of its own, and the node holds their number
_PAGE_HEADER = 16


def place_of(key: memoryview, page_size: int) -> Place | None:
    """Where the value of a key lies; None if it lies beside the key.

    key: where LMDB shows it, in a mapped tree page: what surrounds it is the node that says where
    its value is.
    """
    address = np.frombuffer(key, dtype=np.uint8).__array_interface__["data"][0]
    low, high, flags, size = _NODE.unpack(ctypes.string_at(address - _NODE.size, _NODE.size))
    if size != len(key) or not flags & _OVERFLOW:
        return None
    page = ctypes.c_uint64.from_address(address + size).value
    return Place(page * page_size + _PAGE_HEADER, low | high << 16)


# flags, depth and root page of a table, as the table of tables has it
_TABLE = struct.Struct("<4xHH 32x Q")
_BRANCH, _LEAF = 1, 2  # flags of pages
_DEEPEST = 32


def places_of(
    file: int, page_size: int, table: memoryview, keys: Sequence[bytes]
) -> list[Place | None]:
    """Where the values of keys lie; None for a key that there is not, and for a value that lies
    beside its key.

    table: how the table of tables describes it. LMDB's own search touches the first page of every
    value that it finds, one after the other. Here only pages of keys are read, and all of a level
    are asked for at once. What leads through a page that is not as it must be is not found. Raises
    OSError.
    """
    if len(table) != _TABLE.size:
        return [None] * len(keys)
    _, depth, root = _TABLE.unpack(table)
    end = os.fstat(file).st_size // page_size
    found: dict[bytes, Place] = {}
    pages = {root: list(keys)}
    for _ in range(min(depth, _DEEPEST)):
        pages = {number: inside for number, inside in pages.items() if number < end}
        ask(file, [Place(number * page_size, page_size) for number in pages])
        below: dict[int, list[bytes]] = {}
        for number, inside in pages.items():
            page = os.pread(file, page_size, number * page_size)
            with suppress(struct.error, IndexError):
                _look_up(page, page_size, inside, below, found)
        pages = below
    return [found.get(key) for key in keys]


def _look_up(
    page: bytes,
    page_size: int,
    keys: Sequence[bytes],
    below: dict[int, list[bytes]],
    found: dict[bytes, Place],
) -> None:
    """Look keys up in one page: into `below` go the pages that a branch leads to, into `found` the
    places in a leaf.
    """

    def key_of(node: int) -> bytes:
        size = _NODE.unpack_from(page, node)[3]
        return page[node + _NODE.size : node + _NODE.size + size]

    flags, lower = struct.unpack_from("<HH", page, 10)
    nodes = struct.unpack_from(f"<{(lower - _PAGE_HEADER) // 2}H", page, _PAGE_HEADER)
    for key in keys:
        if flags & _BRANCH:  # its first node stands for all keys before the second one's
            low, high, more, _ = _NODE.unpack_from(
                page, nodes[bisect_right(nodes, key, 1, key=key_of) - 1]
            )
            below.setdefault(low | high << 16 | more << 32, []).append(key)
        elif flags & _LEAF:
            at = bisect_left(nodes, key, key=key_of)
            if at < len(nodes) and key_of(nodes[at]) == key:
                low, high, more, size = _NODE.unpack_from(page, nodes[at])
                if more & _OVERFLOW:
                    (number,) = struct.unpack_from("<Q", page, nodes[at] + _NODE.size + size)
                    found[key] = Place(number * page_size + _PAGE_HEADER, low | high << 16)


def ask(file: int, pieces: Sequence[Place]) -> None:
    """Have the system begin to read pieces of a file into its page cache, in the file's order;
    neighbours as one.
    """
    if not CAN_ASK:
        return
    start = end = 0
    for offset, size in (*sorted(pieces), Place(sys.maxsize, 0)):
        page = offset - offset % mmap.PAGESIZE
        if page > end:
            for part in range(start, end, _ASK_BYTES):
                os.posix_fadvise(file, part, min(_ASK_BYTES, end - part), os.POSIX_FADV_WILLNEED)
            start = page
        end = max(end, offset + size + -(offset + size) % mmap.PAGESIZE)
