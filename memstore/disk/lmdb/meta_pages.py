"""Checks of a data file before LMDB (0.9) opens it: is it as long as its meta pages say, and are
these what was written.

LMDB keeps no checksum of them, and opens whichever says the greater number. One flipped bit there
would undo a commit; the record that every commit of ours leaves, with a checksum, tells.
"""

import os
import struct
from collections import deque
from pathlib import Path

from memstore.disk.files import DATA, share
from memstore.disk.lmdb.key_pages import entries, value_of
from memstore.disk.lmdb.pages import Meta, read_meta
from memstore.disk.lmdb.transaction import COMMIT, read_commit_record
from memstore.errors import RESTORE, CorruptMemory, MemoryNotFound, OlderFormat

_OLD_TABLE = b"blocks"  # the first of memories up to format 9, whose tables had names in LMDB


def _read_metas(file: int) -> list[Meta]:
    """The file's two meta pages in their order; fewer where one is none."""
    first = read_meta(file, 0)
    second = None if first is None else read_meta(file, first.page_size)
    return [meta for meta in (first, second) if meta is not None]


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
            f"{path} is not a memory's data file, or its beginning is damaged; {RESTORE}"
        )
    meta = _newest(metas)
    size = os.fstat(file).st_size  # not before the meta page: another process may be writing
    pages = size // meta.page_size
    missing = meta.last_page + 1 - pages
    if missing > 0 and missing != sum(
        pages <= page <= meta.last_page for page in _free_pages(file, meta)
    ):
        raise CorruptMemory(
            f"{path} is truncated: {size} bytes instead of "
            f"{(meta.last_page + 1) * meta.page_size}; {RESTORE}"
        )
    return meta.map_size


def _newest(metas: list[Meta]) -> Meta:
    return max(metas, key=lambda meta: meta.transaction)


def _free_pages(file: int, meta: Meta) -> set[int]:
    """Numbers of the file's free pages; none if their list is not whole."""
    free = set[int]()
    try:
        for entry in entries(file, meta.page_size, meta.free_root, numbers=True):
            value = value_of(file, entry)  # the first number says how many follow
            free.update(struct.unpack(f"<{len(value) // 8}Q", value)[1:])
    except (ValueError, struct.error):
        return set()
    return free


def check_commits(path: Path, file: int) -> None:
    """Refuse a file whose meta pages are not those of its last two transactions.

    A transaction's number is even on the first page and odd on the second, one apart from the
    other's, and the same as in the record of the commit that is found from there. Raises
    CorruptMemory, OlderFormat.
    """
    metas = _read_metas(file)
    while (wrong := _what_is_wrong(path, file, metas)) is not None:
        before, metas = metas, _read_metas(file)
        if metas == before:  # no other process has committed meanwhile
            raise CorruptMemory(
                f"{path}: {wrong}: the last commit could be lost silently; {RESTORE}"
            )


def _what_is_wrong(path: Path, file: int, metas: list[Meta]) -> str | None:
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
    for meta in (older, newer):
        try:
            recorded = _recorded(path, file, meta)
        except ValueError as error:
            if meta is older:
                continue  # no reader follows it
            return f"transaction {meta.transaction} cannot be read ({error})"
        if recorded != meta.transaction:
            return f"transaction {meta.transaction} is recorded as {recorded}"
    return None


def _recorded(path: Path, file: int, meta: Meta) -> int:
    """The number of the transaction that recorded itself in the state that a meta page leads to; 0
    for a file without a commit. Raises ValueError where a page, or the record, is damaged;
    OlderFormat.
    """
    record = None
    for entry in entries(file, meta.page_size, meta.root):
        if entry.key == _OLD_TABLE:
            raise OlderFormat.of(path.parent)
        if entry.key >= COMMIT:
            record = entry if entry.key == COMMIT else None
            break
    number = 0 if record is None else read_commit_record(value_of(file, record))
    if number is None:
        raise ValueError("its record is damaged")
    return number


def is_sound(path: Path) -> bool:
    """Is every page of keys of a memory's data file, and the beginning of every value, as it must
    be? LMDB may crash on a damaged one, or spoil what is whole when it writes. Raises OSError.
    """
    file = share(path / DATA, create=False)
    try:
        while True:
            metas = _read_metas(file)
            try:
                _check_tables(file, _newest(metas))
                return True
            except ValueError:
                if metas == _read_metas(file):  # no other process has committed meanwhile
                    return False
    finally:
        os.close(file)


def _check_tables(file: int, meta: Meta) -> None:
    """Raises ValueError where a page of the tables, or of the list of free pages, is damaged."""
    deque(entries(file, meta.page_size, meta.root), maxlen=0)
    deque(entries(file, meta.page_size, meta.free_root, numbers=True), maxlen=0)
