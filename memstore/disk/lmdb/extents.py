"""Where values lie in a memory's data file, as LMDB (0.9) lays it out, told without LMDB."""

import ctypes
import mmap
import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from memstore.disk.lmdb.key_pages import Extent, KeyPage, Known
from memstore.disk.lmdb.pages import DEEPEST, HEADER, NODE, OVERFLOW, TABLE_RECORD

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
