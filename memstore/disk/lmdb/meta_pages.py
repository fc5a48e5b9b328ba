"""Check a data file before LMDB (0.9) opens it: its length, and its two meta pages.

LMDB has no checksum of meta pages, and uses the one with the greater transaction number, so one
flipped bit could undo a commit. Every commit of memstore therefore stores a checksummed record.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from memstore.disk.files import DATA, share
from memstore.disk.lmdb.pages import Entry, Meta, Tree, read_meta
from memstore.disk.lmdb.transaction import COMMIT, read_commit_record
from memstore.errors import RESTORE, CorruptMemory, MemoryNotFound


def _read_metas(file: int) -> list[Meta]:
    """The file's two meta pages in order; fewer if one is invalid."""
    first = read_meta(file, 0)
    second = None if first is None else read_meta(file, first.page_size)
    return [meta for meta in (first, second) if meta is not None]


def _newest(metas: list[Meta]) -> Meta:
    return max(metas, key=lambda meta: meta.transaction)


def _free_list(file: int, meta: Meta) -> Iterator[Entry]:
    return Tree(file, meta.page_size, meta.free_root).walk(numbers=True)


def check_file(path: Path, file: int) -> None:
    """Refuse a file that ends before a page in use, which would end the process once mapped, and
    one whose meta pages are not those of its last two transactions.

    The transaction number is even on the first page and odd on the second; the two differ by one,
    and each equals the number in the commit record reached from its page. Raises CorruptMemory,
    MemoryNotFound.
    """
    if not os.fstat(file).st_size:
        raise MemoryNotFound(
            f"{path.parent} holds no memory ({path.name} is empty); create it again"
        )
    metas = _read_metas(file)
    while (wrong := _what_is_wrong(file, metas)) is not None:
        before, metas = metas, _read_metas(file)
        if metas == before:  # no other process has committed concurrently
            raise CorruptMemory(f"{path}: {wrong}; {RESTORE}")


def _free_pages(file: int, meta: Meta) -> set[int]:
    """Numbers of the file's free pages; none if their list is damaged."""
    free = set[int]()
    try:
        for entry in _free_list(file, meta):
            value = os.pread(file, entry.place.size, entry.place.offset)
            # the first number is the count
            free.update(struct.unpack(f"<{len(value) // 8}Q", value)[1:])
    except (ValueError, struct.error):
        return set()
    return free


def _what_is_wrong(file: int, metas: list[Meta]) -> str | None:
    if not metas:
        return "not a memory's data file, or its beginning is damaged"
    meta, size = _newest(metas), os.fstat(file).st_size
    # pages at the end that LMDB allocated and freed in one transaction were never written
    lacking = range(size // meta.page_size, meta.last_page + 1)
    if lacking and not _free_pages(file, meta).issuperset(lacking):
        return f"truncated: {size} bytes instead of {(meta.last_page + 1) * meta.page_size}"
    if len(metas) < 2:
        return "one of its two meta pages is damaged"
    first, second = metas
    if first.constants != second.constants:
        return "its two meta pages differ in what never changes"
    numbers = (first.transaction, second.transaction)
    if numbers == (0, 0):
        return None  # nothing was committed yet
    if numbers[0] % 2 or not numbers[1] % 2 or abs(numbers[0] - numbers[1]) != 1:
        return f"its meta pages name transactions {numbers[0]} and {numbers[1]}"
    older, newer = sorted(metas, key=lambda meta: meta.transaction)
    if newer.last_page < older.last_page:  # a file only grows
        return f"its meta pages name last pages {older.last_page} and {newer.last_page}"
    for meta in (older, newer):
        recorded = _recorded(file, meta)
        if recorded is None and meta is newer:
            return f"transaction {meta.transaction} cannot be read"
        if recorded not in (None, meta.transaction):
            return f"transaction {meta.transaction} is recorded as {recorded}"
    return None


def _recorded(file: int, meta: Meta) -> int | None:
    """The transaction number in the commit record reached from a meta page; 0 before the first
    commit; None where pages on the way are damaged. From the older meta page that is harmless:
    no reader uses it, and its pages may have been overwritten.
    """
    if not meta.transaction:
        return 0
    with suppress(ValueError):
        for key, place, _ in Tree(file, meta.page_size, meta.root).walk():
            if key == COMMIT:
                return read_commit_record(os.pread(file, place.size, place.offset))
    return None


def is_sound(path: Path) -> bool:
    """Are all key pages, and the headers of all values, of a memory's data file valid? On a damaged
    one LMDB may crash, or damage other data when it writes. Raises OSError.
    """
    file = share(path / DATA, create=False)
    try:
        while True:
            metas = _read_metas(file)
            try:
                meta = _newest(metas)
                walks = Tree(file, meta.page_size, meta.root).walk(), _free_list(file, meta)
                deque(chain(*walks), maxlen=0)
                return True
            except ValueError:
                if metas == _read_metas(file):  # no other process has committed concurrently
                    return False
    finally:
        os.close(file)
