"""Where LMDB (0.9) lays a value in its data file, and having the system read values ahead."""

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PAGE_HEADER = 16  # bytes
NODE = struct.Struct("<HHHH")  # low and high half of a size or page, flags or more of it, key size
OVERFLOW = 1  # a flag of a node: its value lies on pages of its own
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
    return Extent(page * page_size + PAGE_HEADER, low | high << 16)


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
