"""Where LMDB (0.9) lays a value in its data file, and having the system read values ahead.

The file begins with two meta pages, each of which describes one of the last two transactions.
"""

import mmap
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

PAGE_HEADER = 16  # bytes
NODE = struct.Struct("<HHHH")  # low and high half of a size or page, flags or more of it, key size
OVERFLOW = 1  # a flag of a node: its value lies on pages of its own
BRANCH = 1  # a flag of a page
PAGE = struct.Struct("<Q2xHHH")  # number, flags, end of the nodes' offsets, begin of the nodes
CAN_ASK = hasattr(os, "posix_fadvise")
_DEEPEST = 32  # levels of a tree
_ASK_BYTES = 1 << 17  # for one hint: the system may cut longer ones short


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


class Meta(NamedTuple):
    """A meta page."""

    constants: tuple[int, ...]  # what both pages have alike
    page_size: int
    map_size: int
    free_root: int
    root: int
    last_page: int
    transaction: int


# flags of the page; magic, version; address, map size; page size, flags and root of the free list;
# flags and root of the tables; last page, transaction
_META = struct.Struct("<10x H 4x II QQ IH 34x Q 4xH 34x Q QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = 8  # a page's flag
_PAGE_SIZES = [1 << power for power in range(9, 17)]


def read_meta(file: int, offset: int) -> Meta | None:
    """The meta page at an offset, read without mapping it; None for any other page. Raises
    OSError.
    """
    page = os.pread(file, _META.size, offset)
    if len(page) < _META.size:
        return None
    kind, magic, version, address, map_size, page_size, *rest = _META.unpack(page)
    free_flags, free_root, flags, root, last_page, transaction = rest
    if (magic, version) != (_MAGIC, _VERSION) or not kind & _META_PAGE:
        return None
    if page_size not in _PAGE_SIZES:
        return None
    constants = (kind, address, page_size, free_flags, flags)
    return Meta(constants, page_size, map_size, free_root, root, last_page, transaction)


def root_of(file: int, page_size: int, transaction: int) -> int | None:
    """The root page of the tables as a transaction sees them; None once two others have ended
    since. Raises OSError.
    """
    meta = read_meta(file, transaction % 2 * page_size)
    return None if meta is None or meta.transaction != transaction else meta.root


def places_of(file: int, page_size: int, root: int, keys: Sequence[bytes]) -> list[Extent | None]:
    """Where the values of keys of one length lie under a root page; None for a key that there is
    not, and for a value that lies beside its key.

    LMDB's own search touches the first page of every value that it finds, one after the other, and
    where the disk fails that ends the process. Here only pages of keys are read, level by level.
    What leads through a page that is not as it must be is not found. Raises OSError.
    """
    found: dict[bytes, Extent] = {}
    level, pages = {root: list(keys)}, os.fstat(file).st_size // page_size
    for _ in range(_DEEPEST if keys else 0):
        level = {number: inside for number, inside in level.items() if number < pages}
        ask(file, [Extent(number * page_size, page_size) for number in level])
        below: dict[int, list[bytes]] = {}
        for number, inside in level.items():
            page = os.pread(file, page_size, number * page_size)
            with suppress(struct.error, IndexError):  # damaged: the rest of its keys is not found
                _look_up(page, number, inside, below, found)
        if not (level := below):
            break
    return list(map(found.get, keys))


def _look_up(
    page: bytes,
    number: int,
    keys: Sequence[bytes],
    below: dict[int, list[bytes]],
    found: dict[bytes, Extent],
) -> None:
    """Look keys up in one page: into `below` go the pages that a branch leads to, into `found` the
    places in a leaf. Raises struct.error, IndexError.
    """
    own, flags, lower, _ = PAGE.unpack_from(page)
    if own != number:
        return
    offsets = struct.unpack_from(f"<{(lower - PAGE_HEADER) // 2}H", page, PAGE_HEADER)
    size = len(keys[0])

    def key_at(offset: int) -> bytes:
        return page[offset + NODE.size : offset + NODE.size + size]

    for key in keys:
        if flags & BRANCH:  # the first node stands for all keys before the second one's
            at = bisect_right(offsets, key, 1, key=key_at) - 1
            low, high, more, _ = NODE.unpack_from(page, offsets[at])
            below.setdefault(low | high << 16 | more << 32, []).append(key)
            continue
        at = bisect_left(offsets, key, key=key_at)
        if at < len(offsets) and key_at(offsets[at]) == key:
            low, high, more, key_size = NODE.unpack_from(page, offsets[at])
            if more & OVERFLOW and key_size == size:
                (first,) = struct.unpack_from("<Q", page, offsets[at] + NODE.size + size)
                found[key] = Extent(first * len(page) + PAGE_HEADER, low | high << 16)


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
