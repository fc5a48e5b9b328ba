"""A memory's data file as LMDB (0.9) lays it out, read without LMDB: is it whole, where does a
value lie.
"""

import ctypes
import mmap
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memstore.errors import CorruptMemory, MemoryNotFound

CAN_ASK = hasattr(os, "posix_fadvise")
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short


class _Meta(NamedTuple):
    page_size: int
    map_size: int
    last_page: int
    transaction: int
    free_root: int


_META = struct.Struct("<16x IIQQ I4xQQQQQ 48x QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = 2**64 - 1


def _read_meta(file: int) -> _Meta | None:
    """The newer of the file's two meta pages, read without mapping it; None if there is none."""
    metas = []
    offset = 0
    for _ in range(2):
        page = os.pread(file, _META.size, offset)
        if len(page) == _META.size:
            (
                magic,
                version,
                _,
                map_size,
                page_size,
                _,
                _,
                _,
                _,
                free_root,
                last_page,
                transaction,
            ) = _META.unpack(page)
            if magic == _MAGIC and version == _VERSION and 512 <= page_size <= 65536:
                metas.append(_Meta(page_size, map_size, last_page, transaction, free_root))
        offset = metas[0].page_size if metas else os.sysconf("SC_PAGE_SIZE")
    return max(metas, key=lambda meta: meta.transaction, default=None)


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
    meta = _read_meta(file)
    if meta is None:
        raise CorruptMemory(
            f"{path} is not a memory's data file, or its beginning is damaged; restore it from a "
            "copy"
        )
    size = os.fstat(file).st_size  # not before the meta page: another process may be writing
    pages = size // meta.page_size
    missing = meta.last_page + 1 - pages
    if missing > 0:
        free = _free_pages(file, meta, pages)
        if free is None or sum(pages <= page <= meta.last_page for page in free) != missing:
            raise CorruptMemory(
                f"{path} is truncated: {size} bytes instead of "
                f"{(meta.last_page + 1) * meta.page_size}; "
                "restore it from a copy"
            )
    return meta.map_size


def _free_pages(file: int, meta: _Meta, pages: int) -> set[int] | None:
    """Numbers of the file's free pages, read without mapping it; None if their list is not
    whole.
    """
    free: set[int] = set()
    todo = [] if meta.free_root == _NO_PAGE else [meta.free_root]
    seen: set[int] = set()
    while todo:
        number = todo.pop()
        if number >= pages or number in seen:
            return None
        seen.add(number)
        page = os.pread(file, meta.page_size, number * meta.page_size)
        flags, lower = struct.unpack_from("<HH", page, 10)
        for index in range((lower - 16) // 2):
            (node,) = struct.unpack_from("<H", page, 16 + 2 * index)
            if node + 8 > len(page):
                return None
            low, high, node_flags, key_size = struct.unpack_from("<HHHH", page, node)
            if flags & 1:  # a branch: the node is a page number
                todo.append(low | high << 16 | node_flags << 32)
                continue
            data_size = low | high << 16
            data = page[node + 8 + key_size : node + 8 + key_size + data_size]
            if node_flags & 1:  # the value lies on overflow pages
                (first,) = struct.unpack_from("<Q", page, node + 8 + key_size)
                data = (
                    os.pread(file, data_size, first * meta.page_size + 16) if first < pages else b""
                )
            if len(data) != data_size or data_size % 8:
                return None
            # the first says how many follow
            free.update(np.frombuffer(data, dtype="<u8")[1:].tolist())
    return free


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
