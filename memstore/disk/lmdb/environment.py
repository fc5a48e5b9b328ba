"""The LMDB environment of a memory's directory in this process: opening and its checks,
transactions, growing the map, and rewriting the file.

One environment is shared by all Database objects of a process that name the same directory, and it
is unusable in a forked child, which cannot open that directory either (a spawned process can, and
one forked before the directory was opened). Every commit reaches the disk before it returns.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from memstore.disk.files import (
    DATA,
    INDEX,
    LOCK,
    NETWORK,
    NO_PERMISSION,
    NO_SPACE,
    check_one_name,
    check_regular,
    file_system_of,
    lies_at,
    mode_of,
    named_os_errors,
    not_alone,
    occupy_standard_streams,
    replacement,
    share,
    storage_full,
    sweep,
    sync_directory,
    take_room,
    try_alone,
    whole_pages,
)
from memstore.disk.lmdb.locks import Gate, WriterLock
from memstore.disk.lmdb.meta_pages import check_commits, check_length
from memstore.disk.lmdb.new_file import fill
from memstore.disk.lmdb.transaction import COMMIT, DataFile, Transaction, commit_record
from memstore.errors import (
    CorruptMemory,
    InvalidInput,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    MemstoreError,
    ReadOnlyMemory,
    StorageFull,
)

T = TypeVar("T")

INITIAL_MAP = 1 << 28  # bytes of address space; the file grows only with what is written
MAX_READERS = 512
_LOCK_BYTES = 64 * (MAX_READERS + 2)  # of LMDB's lock file


@contextmanager
def named_lmdb_errors(path: Path) -> Iterator[None]:
    """What LMDB says of the memory in `path`, as errors that say what to do."""
    try:
        yield
    except lmdb.Error as error:
        raise _named(path, error) from error


def _named(path: Path, error: lmdb.Error) -> MemstoreError:
    text = str(error)
    if isinstance(error, lmdb.DiskError) or any(
        os.strerror(code) in text for code in (*NO_SPACE, errno.EIO)
    ):
        # LMDB reports a short write, which is how a disk fills up, as an input/output error.
        return storage_full(path, text)
    if isinstance(error, lmdb.MemoryError):
        return StorageFull(
            f"{path} could not be used ({text}): this process may not have more memory; "
            "raise the limit (ulimit -v)"
        )
    if isinstance(error, lmdb.ReadonlyError) or any(
        os.strerror(code) in text for code in NO_PERMISSION
    ):
        return ReadOnlyMemory(f"{path} cannot be used ({text}); check its permissions")
    if isinstance(error, lmdb.ReadersFullError):
        return MemoryLocked(
            f"{path} has {MAX_READERS} readers already; try again when some are done"
        )
    return CorruptMemory(f"{path} cannot be read ({text}); run verify, or restore it from a copy")


class Version(NamedTuple):
    """Which state of a memory is the last that was committed."""

    file: int  # how often this process has rewritten the file
    transaction: int  # numbers count from 1 in each


class Environment:
    """The LMDB environment of one directory in one process, open for writing wherever the directory
    allows that. Opening and reading never wait for, or hinder, a process that writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.users = 0
        self.limit: int | None = None
        self.lock = WriterLock(path)
        self.lock.on_release = self._sync
        self._gate = Gate()
        self._write_mutex = threading.Lock()
        self._thread = threading.local()
        self.data_file: int | None = None
        self.page_size = mmap.PAGESIZE
        self._inner: Any = None
        self.writable = False  # whether the directory allows it
        self.rewritten = 0
        self.names_written: set[str] = set()  # documents that this process is writing
        self.names_lock = threading.Lock()
        kind = file_system_of(path)
        if kind in NETWORK:
            raise InvalidInput(
                f"{path} is on a network file system ({kind}); keep the memory on a local disk"
            )

    def create(self, first: Callable[[Transaction], None], limit: int | None) -> None:
        """Make the memory with its first content. Raises what Database.create raises."""
        map_size = INITIAL_MAP
        if limit is not None:  # LMDB takes a map of no page as one of its own default size
            map_size = min(map_size, max(whole_pages(limit), mmap.PAGESIZE))
        self.lock.acquire(wait=False)
        try:
            self._open(map_size)
            if self._inner.stat()["entries"]:
                raise MemoryExists(
                    f"{self.path} already holds a memory; open it, or name another directory"
                )
            self.limit = limit
            self.write(first, beyond_limit=False)
        except BaseException:
            self.close()
            raise
        finally:
            self.lock.release()

    def open(self) -> None:
        """Open what is there. Raises what Database.open raises."""
        try:
            self._open()
            if not self._inner.stat()["entries"]:
                raise MemoryNotFound(
                    f"{self.path} holds no whole memory (making it was interrupted); create it "
                    "again"
                )
        except BaseException:
            self.close()
            raise

    def _open(self, new_map_size: int | None = None) -> None:
        occupy_standard_streams()
        data, lock = self.path / DATA, self.path / LOCK
        new = new_map_size is not None and (not data.exists() or not data.lstat().st_size)
        self.writable = all(
            os.access(name, os.W_OK) for name in (self.path, data, lock) if name.exists()
        )
        with named_os_errors(self.path):
            check_regular(lock)
            self.data_file = share(data, create=new)
            if new_map_size is not None and new:
                map_size = new_map_size
            else:
                map_size = check_length(data, self.data_file)
                check_commits(data, self.data_file)
            # Without permission to write the lock file (LMDB's readers register in it) a reader
            # goes without: the pages it reads may be reused under it by a writer, which the
            # checksums then refuse.
            locked = self.writable or os.access(lock, os.W_OK)
            if locked:  # LMDB maps it: a page that finds no room would end the process
                take_room(lock, _LOCK_BYTES, mode_of(data) or 0o600)
        with named_lmdb_errors(self.path):
            self._inner = lmdb.open(
                os.fsencode(self.path),
                map_size=map_size,
                max_readers=MAX_READERS,
                create=new,
                readonly=not self.writable,
                mode=mode_of(data) or 0o600,
                lock=locked,
                readahead=False,
                sync=True,
                metasync=False,
            )
            self.page_size = self._inner.stat()["psize"]
            self._inner.reader_check()

    def in_transaction(self) -> bool:
        return getattr(self._thread, "transaction", None) is not None

    def acquire_writer(self, *, wait: bool) -> None:
        """Take the writer lock of the directory that was opened."""
        if self.in_transaction():
            raise RuntimeError(
                "writing inside a transaction of the same thread: end that one first"
            )
        first = self.lock.acquire(wait=wait)
        try:
            if not self.lies_at(self.path):
                raise self.gone()
            if first:
                if self.data_file is not None:
                    check_one_name(self.path / DATA, self.data_file)
                self._sweep()
        except BaseException:
            self.lock.release()
            raise

    def lies_at(self, path: Path) -> bool:
        """Is the open data file the one of the directory `path`? True where none is open."""
        self._gate.enter()  # not while another takes its place
        try:
            return self.data_file is None or lies_at(path / DATA, self.data_file)
        finally:
            self._gate.leave()

    def gone(self) -> MemoryNotFound:
        """The error for a directory that is not the one that was opened."""
        return MemoryNotFound(
            f"{self.path} holds the memory no longer: it was removed, moved or replaced while it "
            "was open"
        )

    def _sweep(self) -> None:
        sweep(self.path)
        if not (self.path / INDEX).is_symlink():
            sweep(self.path / INDEX)

    def close(self) -> None:
        # Forgotten first: after an interrupt that comes while one is closed nobody uses it again.
        if self._inner is not None:
            inner, self._inner = self._inner, None
            inner.close()
        if self.data_file is not None:
            file, self.data_file = self.data_file, None
            os.close(file)

    def _reopen(self) -> None:
        """After a failure that leaves LMDB's environment unusable, though not the file. Called
        alone.
        """
        self.close()
        self._open()

    def _sync(self) -> None:
        # Commits leave the last meta page to the next one's sync; the last writer of all does not.
        if self._inner is not None and self.writable:
            with named_lmdb_errors(self.path):
                self._inner.sync(True)

    # Transactions

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        current: Transaction | None = getattr(self._thread, "transaction", None)
        if current is not None:
            yield current
            return
        with named_lmdb_errors(self.path):
            inner = self._begin(write=False)
            try:
                self._thread.transaction = self._transaction(inner, writable=False)
                yield self._thread.transaction
            finally:
                self._thread.transaction = None
                self._end(inner)

    def _transaction(self, inner: Any, *, writable: bool) -> Transaction:
        assert self.data_file is not None
        data = DataFile(self.path, self.data_file, self.page_size)
        return Transaction(inner, data, writable=writable)

    def write(self, work: Callable[[Transaction], T], *, beyond_limit: bool) -> T:
        with self._write_mutex, named_lmdb_errors(self.path):
            result = self._write(work, beyond_limit=beyond_limit)
            if beyond_limit:
                # What a batch frees can be used from the second batch after it on: make this one
                # the first.
                self._write(lambda transaction: None, beyond_limit=True)
        if beyond_limit:
            self.set_limit(self.limit)
        return result

    def _write(self, work: Callable[[Transaction], T], *, beyond_limit: bool) -> T:
        while True:
            transaction = self._transaction(self._begin(write=True), writable=True)
            self._thread.transaction = transaction
            try:
                result = work(transaction)
                transaction.inner.put(COMMIT, commit_record(transaction.inner.id()))
                transaction.inner.commit()
                return result
            except lmdb.MapFullError:
                pass  # grown below: that has to wait until this thread has passed the gate
            finally:
                self._thread.transaction = None
                self._end(transaction.inner)
            self._grow(transaction.bytes_put, beyond_limit=beyond_limit)

    def version(self) -> Version:
        self._gate.enter()
        try:
            return Version(self.rewritten, self._inner.info()["last_txnid"])
        finally:
            self._gate.leave()

    def _end(self, inner: Any) -> None:
        # a forked child that leaves the block would end its parent's transaction
        if self.pid == os.getpid():
            inner.abort()  # of a committed one: nothing
            self._gate.leave()

    def _begin(self, *, write: bool) -> Any:
        """Pass the gate and begin; on any error the gate is left."""
        reopened = False
        while True:
            self._gate.enter()
            try:
                return self._inner.begin(write=write, buffers=True)
            except lmdb.MapResizedError:
                self._gate.leave()
                with self._gate.alone():
                    self._inner.set_mapsize(0)  # another process grew the map: take its size
            # unusable after a failed write, or reopening it had failed
            except (lmdb.PanicError, AttributeError):
                self._gate.leave()
                if reopened:
                    raise
                reopened = True
                with self._gate.alone():
                    self._reopen()
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self._inner.reader_check():  # none of them was dead
                    raise
            except BaseException:
                self._gate.leave()
                raise

    # Rewriting the file

    def rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        """Put a new file in the place of this one, that holds what `change` leaves and no other
        byte. Nothing is changed where that fails.
        """
        with self._write_mutex, named_lmdb_errors(self.path), named_os_errors(self.path):
            with self.read():
                pass  # reopened if need be
            while True:
                try:
                    with self._gate.alone():
                        result = self._rewrite(change, before_switch)
                    break
                except lmdb.MapFullError:  # of the old file: a change takes room there too
                    self._grow(0, beyond_limit=True)
        self.set_limit(self.limit)
        return result

    def _rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        assert self.data_file is not None
        if not try_alone(self.data_file):
            raise MemoryLocked(
                f"{self.path} is open in another process; rewriting its file needs it alone"
            )
        inner = self._inner.begin(write=True, buffers=True)
        switched = False
        try:
            transaction = self._transaction(inner, writable=True)
            result = change(transaction)
            entries = (entry for entry in transaction.entries() if entry[0] != COMMIT)
            size = max(INITIAL_MAP, 2 * os.fstat(self.data_file).st_size)
            with replacement(self.path / DATA) as file:
                fill(Path(file.name), entries, size)
                self._sweep()
                before_switch()
            switched = True
            self.rewritten += 1
            sync_directory(self.path)
            return result
        finally:
            inner.abort()
            if switched:
                self._reopen()
            else:
                not_alone(self.data_file)

    # The map

    def _grow(self, needed: int, *, beyond_limit: bool) -> None:
        with self._gate.alone():
            size = self._inner.info()["map_size"]
            wanted = max(2 * size, size + 2 * needed)
            if self.limit is not None:
                if beyond_limit:
                    wanted = size + max(1 << 20, size // 8)
                else:
                    wanted = min(wanted, whole_pages(self.limit))
                if wanted <= size:
                    raise StorageFull(
                        f"{self.path} has used up its quota of {self.limit / 1e6:,.1f} MB; "
                        "raise the quota, or forget documents"
                    )
            self._set_map(whole_pages(wanted))

    def _set_map(self, size: int) -> None:
        try:
            self._inner.set_mapsize(size)
        except (lmdb.Error, OverflowError) as error:
            self._reopen()
            raise StorageFull(
                f"{self.path} could not be mapped to {size / 1e6:,.1f} MB ({error}); raise the "
                "limit (ulimit -v)"
            ) from error

    def set_limit(self, limit: int | None) -> None:
        self.limit = limit
        if limit is not None and self.writable:
            with self._gate.alone():
                info = self._inner.info()
                used = (info["last_pgno"] + 1) * self._inner.stat()["psize"]
                allowed = max(whole_pages(limit), used)
                if info["map_size"] > allowed:
                    self._set_map(allowed)
