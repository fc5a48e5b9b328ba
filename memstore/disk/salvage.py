"""A new data file of all that can still be reached in a damaged one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack

from memstore.block import RecordKey
from memstore.disk.files import (
    DATA,
    named_os_errors,
    replacement,
    share,
    sweep,
    sync_directory,
    try_alone,
)
from memstore.disk.format.keys import number_key, record_key, run_key, tokens_key
from memstore.disk.lmdb.environment import named_lmdb_errors
from memstore.disk.lmdb.locks import WriterLock
from memstore.disk.lmdb.meta_pages import Tree, read_states
from memstore.disk.lmdb.new_file import Entry, fill
from memstore.disk.lmdb.transaction import COMMIT_KEY, TABLES, Commit, digest
from memstore.disk.tables import changes
from memstore.disk.tables.passage_table import DIGEST_BYTES
from memstore.errors import CorruptMemory, MemoryLocked

_NEXT = b"next_document"
_KEY_SIZES = {
    "documents": len(number_key(0)),
    "tokens": len(tokens_key(0, 0)),
    "landmarks": len(run_key(0, 0, 0, of_selector=False)),
    "passages": len(number_key(0)),
    "digests": DIGEST_BYTES,
    "blocks": len(record_key(RecordKey(0, 0, 0))),
}


class _State(NamedTuple):
    """A state of the memory, as a commit left it."""

    number: int  # of the commit
    root: int
    committed: float  # when


def salvage(path: Path) -> int | None:
    """Put a new data file in the place of a damaged one, with all of it that can be reached; return
    the number of the last commit if that is undone by it.

    What is left of a document may be part of it. Nobody else writes, or opens the memory, until it
    is done; killed at any point, the old file or the new one is there. Raises CorruptMemory
    (nothing can be saved), MemoryLocked, StorageFull, ReadOnlyMemory.
    """
    lock = WriterLock(path)
    lock.acquire(wait=False)
    try:
        with named_os_errors(path), named_lmdb_errors(path):
            file = share(path / DATA, create=False)
            try:
                if not try_alone(file):
                    raise MemoryLocked(
                        f"{path} is open in another process; this repair needs it alone"
                    )
                sweep(path)
                state, undone = _newest(path, file)
                tree = Tree(file, read_states(file).page_size)
                with replacement(path / DATA) as new:
                    fill(Path(new.name), _rescued(tree, state.root), state.committed)
                sync_directory(path)
                return undone
            finally:
                os.close(file)
    finally:
        lock.release()


def is_sound(path: Path) -> bool:
    """Is every page of keys of a memory's data file as it must be? What is to be changed in place
    must be; the caller holds the writer lock. Raises OSError.
    """
    file = share(path / DATA, create=False)
    try:
        states = read_states(file)
        tree = Tree(file, states.page_size)
        roots = [states.newest, *tree.tables(states.newest).values()]
        return all(map(tree.is_sound, roots)) and tree.is_sound(states.free_root, numbers=True)
    finally:
        os.close(file)


def _newest(path: Path, file: int) -> tuple[_State, int | None]:
    """The last state that can be read, and the number of the commit that is lost by taking it."""
    told = read_states(file)
    tree = Tree(file, told.page_size)
    states = {root: _state(tree, root, number) for root, number in told.roots.items()}
    found = sorted(state for state in states.values() if state is not None)
    last = found[-1].number if found else None
    # a damaged meta page may lead to the root of an older commit
    led_astray = any(
        state is not None and told.roots[root] not in (None, state.number)
        for root, state in states.items()
    )
    if led_astray or len(found) < 2 or last != found[0].number + 1:
        # The meta page of the last commit may be lost; its pages are there.
        for page in filter(tree.is_leaf, range(2, tree.pages)):
            state = _state(tree, page, None)
            if state is not None and state.number and (last is None or state.number == last + 1):
                found.append(state)
    if not found:
        raise CorruptMemory(
            f"{path}: nothing can be saved, the memory's own description is damaged; restore it "
            "from a copy"
        )
    newest = max(found)
    unread = [told.roots[root] for root, state in states.items() if state is None]
    return newest, newest.number + 1 if newest.number + 1 in unread else None


def _state(tree: Tree, root: int, told: int | None) -> _State | None:
    """The state under a root page, if it is one of a memory. told: its number, by a meta page."""
    table = tree.tables(root).get("meta")
    if table is None:
        return None
    wanted = (b"memory", COMMIT_KEY)
    rows = {key: value for key, _, value in tree.entries(table) if key in wanted}
    if not _is_right("meta", b"memory", rows.get(b"memory", b"")):
        return None
    record = rows.get(COMMIT_KEY)
    known = None if record is None else Commit.unpack(record)
    return (
        _State(told or 0, root, time.time())
        if known is None
        else _State(known.transaction, root, known.time)
    )


def _rescued(tree: Tree, root: int) -> Iterator[Entry]:
    """Every entry under a root page that can be right."""
    tables = tree.tables(root)
    counted, last = False, 0
    for table in TABLES:
        for key, flags, value in tree.entries(tables[table]) if table in tables else ():
            if flags or (table != "blocks" and not _is_right(table, key, value)):
                continue
            if table == "meta":
                # rows may come to be others without its telling: whoever has seen them looks again
                if key in (changes.KEY, COMMIT_KEY):
                    continue
                counted |= key == _NEXT
            elif len(key) == _KEY_SIZES[table]:
                if table != "digests":
                    last = max(last, int.from_bytes(key[:8], "big"))
            else:
                continue
            yield table, key, value
    if not counted:
        value = msgpack.packb(last + 1)
        yield "meta", _NEXT, digest("meta", _NEXT, value) + value


def _is_right(table: str, key: bytes, value: bytes) -> bool:
    return digest(table, key, value[8:]) == value[:8]
