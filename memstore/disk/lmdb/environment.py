"""The LMDB environment of a memory's directory in this process: checked opening, and rewriting the
file.

All Database objects of one directory in a process share an environment. A child forked while it is
open can neither use it nor open that directory; a spawned process, or one forked earlier, can.
Every commit reaches the disk before it returns.
"""

import os
import resource
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from memstore.disk.files import (
    DATA,
    LOCK,
    WriterLock,
    check_local,
    lock_alone,
    mode_of,
    named_os_errors,
    replacement,
    share,
    sweep_memory,
    sync_directory,
    take_room,
)
from memstore.disk.lmdb.meta_pages import check_file
from memstore.disk.lmdb.transaction import (
    COMMIT,
    MAX_READERS,
    Gate,
    Transaction,
    commit_record,
    named_lmdb_errors,
)
from memstore.errors import MemoryExists, MemoryNotFound

T = TypeVar("T")

# address space, not memory, of which a process has 128 TiB; the file grows with its content
MAP_BYTES = 1 << 38
_LEAST_MAP = 1 << 24
_LOCK_BYTES = 64 * (MAX_READERS + 2)  # of LMDB's lock file
_FILLED = 16 << 20  # bytes of a transaction that fills a new file


def _open_lmdb(path: Path, data: Path, **options: Any) -> Any:
    """An LMDB environment whose map lets the file `data` grow at least fourfold, within this
    process's limit (ulimit -v) and the machine's address space (512 GiB on some processors). LMDB
    uses the file's size if that is larger. Raises lmdb.Error.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    size = max(MAP_BYTES, 4 * data.stat().st_size if data.exists() else 0)
    if most != resource.RLIM_INFINITY:
        size = min(size, most >> 14 << 12)
    while True:
        try:
            return lmdb.open(os.fsencode(path), map_size=size, **options)
        except lmdb.MemoryError:
            if size < _LEAST_MAP:
                raise
            size = size >> 14 << 12


class Environment:
    """The LMDB environment of one directory in one process, open for writing if the directory
    allows it. Opening and reading neither wait for a writing process nor block it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.users = 0
        self.lock = WriterLock(path)
        self.gate = Gate()
        self.write_mutex = threading.Lock()
        self.thread = threading.local()
        self.data_file: int | None = None
        self.page_size = 0
        self.inner: Any = None
        self.writable = False  # do the directory's permissions allow writing
        self.rewritten = 0
        self.names_written: dict[str, object] = {}  # documents that this process is writing
        check_local(path)

    def open(self, *, create: bool = False) -> None:
        """Open a memory, or make an empty one. Raises what Database.open or Database.create
        raises.
        """
        self._open(create=create)
        with named_lmdb_errors(self.path), self.inner.begin() as txn:
            # of this view: LMDB tells the newest number of entries before new views hold them
            there = txn.stat(self.inner.open_db(None, txn=txn))["entries"]
        if create and there:
            raise MemoryExists(
                f"{self.path} already holds a memory; open it, or name another directory"
            )
        if not create and not there:
            raise MemoryNotFound(
                f"{self.path} holds a memory whose creation was interrupted; create it again"
            )

    def _open(self, *, create: bool = False) -> None:
        data, lock = self.path / DATA, self.path / LOCK
        new = create and (not data.exists() or not data.lstat().st_size)
        self.writable = all(
            os.access(name, os.W_OK) for name in (self.path, data, lock) if name.exists()
        )
        with named_os_errors(self.path):
            self.data_file = share(data, create=new)
            if not new:
                check_file(data, self.data_file)
            # LMDB's readers register in the lock file. A reader that may not write it goes without:
            # a writer may then reuse pages that it reads, which checksums detect.
            locked = self.writable or os.access(lock, os.W_OK)
            if locked:  # LMDB maps it: without disk space a page fault would end the process
                take_room(lock, _LOCK_BYTES, mode_of(data) or 0o600)
        with named_lmdb_errors(self.path):
            self.inner = _open_lmdb(
                self.path,
                data,
                max_readers=MAX_READERS,
                create=new,
                readonly=not self.writable,
                mode=mode_of(data) or 0o600,
                lock=locked,
            )
            self.page_size = self.inner.stat()["psize"]
            self.inner.reader_check()

    def gone(self) -> MemoryNotFound:
        """The error for a directory that is no longer the one that was opened."""
        return MemoryNotFound(
            f"{self.path} no longer holds the memory: it was removed, moved or replaced while it "
            "was open; move it back, or open it again"
        )

    def close(self) -> None:
        # cleared first, so that nothing is used after an interrupt while it is being closed
        if self.inner is not None:
            inner, self.inner = self.inner, None
            inner.close()
        if self.data_file is not None:
            file, self.data_file = self.data_file, None
            os.close(file)

    def reopen(self) -> None:
        """Reopen LMDB's environment after a failure that made it unusable, or for a new file.
        Called with the gate closed to others.
        """
        self.close()
        self._open()

    # Rewriting the file

    def rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        """Replace the file by a new one without bytes that `change` deletes; on failure nothing
        changes. The caller holds the writer lock and the write mutex.
        """
        with named_lmdb_errors(self.path), named_os_errors(self.path), self.gate.alone():
            assert self.data_file is not None
            lock_alone(self.data_file, self.path)
            inner = self.inner.begin(write=True, buffers=True)
            try:
                transaction = Transaction(inner, self.path, None)
                result = change(transaction)
                with replacement(self.path / DATA) as file:
                    _fill(Path(file.name), transaction.entries(), self.path / DATA)
                    sweep_memory(self.path)
                    before_switch()
                self.rewritten += 1
                sync_directory(self.path)
                return result
            finally:
                inner.abort()
                self.reopen()  # also locks the file as shared again


def _fill(file: Path, entries: Iterable[tuple[bytes, memoryview]], old: Path) -> None:
    """Write entries of the `old` file, in the order of their keys, into an empty file, which the
    caller syncs. LMDB's own compaction would copy whole pages with deleted bytes. Raises
    lmdb.Error.
    """
    size = 0
    with _open_lmdb(file, old, subdir=False, lock=False, sync=False) as environment:
        txn = environment.begin(write=True)
        for key, value in entries:
            if key != COMMIT:
                txn.put(key, value, append=True)
            size += len(value)
            if size >= _FILLED:
                txn.put(COMMIT, commit_record(txn.id()))
                txn.commit()
                txn, size = environment.begin(write=True), 0
        txn.put(COMMIT, commit_record(txn.id()))
        txn.commit()
