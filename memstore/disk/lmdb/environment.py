"""The LMDB environment of a memory's directory in this process: opening and its checks,
transactions, and rewriting the file.

One environment is shared by all Database objects of a process that name the same directory, and it
is unusable in a forked child, which cannot open that directory either (a spawned process can, and
one forked before the directory was opened). Every commit reaches the disk before it returns.
"""

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from memstore.disk.files import (
    DATA,
    INDEX,
    LOCK,
    NO_PERMISSION,
    NO_SPACE,
    check_local,
    check_one_name,
    lies_at,
    lock_alone,
    mode_of,
    named_os_errors,
    replacement,
    share,
    storage_full,
    sweep,
    sync_directory,
    take_room,
)
from memstore.disk.lmdb.locks import Gate, WriterLock
from memstore.disk.lmdb.meta_pages import check_file
from memstore.disk.lmdb.pages import Tree, read_meta
from memstore.disk.lmdb.transaction import COMMIT, Transaction, commit_record
from memstore.errors import (
    CorruptMemory,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    MemstoreError,
    ReadOnlyMemory,
    StorageFull,
)

T = TypeVar("T")

# of address space, not of memory; the file grows with what is written. A process has 128 TiB for
# all of its memories.
MAP_BYTES = 1 << 38
_LEAST_MAP = 1 << 24
MAX_READERS = 512
_LOCK_BYTES = 64 * (MAX_READERS + 2)  # of LMDB's lock file
_FILLED = 16 << 20  # bytes of a transaction that fills a new file


@contextmanager
def named_lmdb_errors(path: Path) -> Iterator[None]:
    """What LMDB says of the memory in `path`, as errors that say what to do."""
    try:
        yield
    except lmdb.Error as error:
        raise _named(path, error) from error


def _named(path: Path, error: lmdb.Error) -> MemstoreError:
    text = str(error)
    if isinstance(error, lmdb.MapFullError):
        return StorageFull(
            f"{path} has filled what this process mapped of it; run the command again, which maps "
            "more and resumes, or raise the limit of address space (ulimit -v)"
        )
    if isinstance(error, lmdb.DiskError) or any(
        os.strerror(code) in text for code in (*NO_SPACE, errno.EIO)
    ):
        # LMDB reports a short write, which is how a disk fills up, as an input/output error.
        return storage_full(path, text)
    if isinstance(error, lmdb.MemoryError):
        return StorageFull(
            f"{path} could not be mapped ({text}): this process may not have more address space; "
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


def _open_lmdb(path: Path, data: Path, **options: Any) -> Any:
    """An LMDB environment, mapped so that the file `data` has room to grow fourfold at least,
    within what this process may have (ulimit -v) and the machine's addresses leave (some processors
    have 512 GiB). LMDB takes the file's size if that is more. Raises lmdb.Error.
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
        self.lock = WriterLock(path)
        self._gate = Gate()
        self._write_mutex = threading.Lock()
        self._thread = threading.local()
        self.data_file: int | None = None
        self._page_size = 0
        self._inner: Any = None
        self.writable = False  # whether the directory allows it
        self.rewritten = 0
        self.names_written: dict[str, object] = {}  # documents that this process is writing
        check_local(path)

    def open(self, first: Callable[[Transaction], None] | None = None) -> None:
        """Open what is there, or make the memory with its `first` content. Raises what
        Database.open or Database.create raises.
        """
        try:
            with nullcontext() if first is None else self.lock.held():
                self._open(create=first is not None)
                there = self._inner.stat()["entries"]
                if first is not None and there:
                    raise MemoryExists(
                        f"{self.path} already holds a memory; open it, or name another directory"
                    )
                if first is None and not there:
                    raise MemoryNotFound(
                        f"{self.path} holds no whole memory (making it was interrupted); create "
                        "it again"
                    )
                if first is not None:
                    self.write(first)
        except BaseException:
            self.close()
            raise

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
            # Without permission to write the lock file (LMDB's readers register in it) a reader
            # goes without: the pages it reads may be reused under it by a writer, which the
            # checksums then refuse.
            locked = self.writable or os.access(lock, os.W_OK)
            if locked:  # LMDB maps it: a page that finds no room would end the process
                take_room(lock, _LOCK_BYTES, mode_of(data) or 0o600)
        with named_lmdb_errors(self.path):
            self._inner = _open_lmdb(
                self.path,
                data,
                max_readers=MAX_READERS,
                create=new,
                readonly=not self.writable,
                mode=mode_of(data) or 0o600,
                lock=locked,
            )
            self._page_size = self._inner.stat()["psize"]
            self._inner.reader_check()

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Hold the writer lock of the directory that was opened."""
        if getattr(self._thread, "transaction", None) is not None:
            raise RuntimeError(
                "writing inside a transaction of the same thread: end that one first"
            )
        with self.lock.held() as first:
            if not self.lies_at(self.path):
                raise self.gone()
            if first:
                if self.data_file is not None:
                    check_one_name(self.path / DATA, self.data_file)
                self._sweep()
            yield

    def lies_at(self, path: Path) -> bool:
        """Is the open data file the one of the directory `path`? True where none is open."""
        with self._gate.passed():  # not while another takes its place
            return self.data_file is None or lies_at(path / DATA, self.data_file)

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
                while (tree := self._tree(seen := inner.id())) is None:
                    inner.abort()
                    inner = self._inner.begin(buffers=True)
                    if inner.id() == seen:  # no two commits came in between
                        raise CorruptMemory(
                            f"{self.path}: the file was changed by something else while it was "
                            "open, or damaged; close it, then run verify"
                        )
                self._thread.transaction = Transaction(inner, self.path, tree)
                yield self._thread.transaction
            finally:
                self._thread.transaction = None
                self._end(inner)

    def _tree(self, transaction: int) -> Tree | None:
        """The tables as a transaction sees them; None once two others have ended since. Raises
        CorruptMemory.
        """
        assert self.data_file is not None
        try:
            meta = read_meta(self.data_file, transaction % 2 * self._page_size)
        except OSError as error:
            raise CorruptMemory(
                f"{self.path} cannot be read ({error}); check the disk, then run verify"
            ) from error
        if meta is None or meta.transaction != transaction:
            return None
        return Tree(self.data_file, self._page_size, meta.root)

    def write(self, work: Callable[[Transaction], T]) -> T:
        with self._write_mutex, named_lmdb_errors(self.path):
            inner = self._begin(write=True)
            self._thread.transaction = Transaction(inner, self.path, None)
            try:
                result = work(self._thread.transaction)
                inner.put(COMMIT, commit_record(inner.id()))
                inner.commit()
                return result
            finally:
                self._thread.transaction = None
                self._end(inner)

    def version(self) -> Version:
        with self._gate.passed():
            return Version(self.rewritten, self._inner.info()["last_txnid"])

    def _begin(self, *, write: bool) -> Any:
        """Pass the gate and begin; on any error the gate is left."""
        reopened = False
        while True:
            self._gate.enter()
            try:
                return self._inner.begin(write=write, buffers=True)
            # unusable after a failed write, reopening it had failed, or the file outgrew the map
            except (lmdb.PanicError, lmdb.MapResizedError, AttributeError):
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

    def _end(self, inner: Any) -> None:
        # a forked child that leaves the block would end its parent's transaction
        if self.pid == os.getpid():
            inner.abort()  # of a committed one: nothing
            self._gate.leave()

    def _reopen(self) -> None:
        """After a failure that leaves LMDB's environment unusable, though not the file, and for a
        file that has taken its place. Called alone.
        """
        self.close()
        self._open()

    # Rewriting the file

    def rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        """Put a new file in the place of this one, that holds what `change` leaves and no other
        byte. Nothing is changed where that fails.
        """
        with self._write_mutex, named_lmdb_errors(self.path), named_os_errors(self.path):
            with self.read():
                pass  # reopened if need be
            with self._gate.alone():
                assert self.data_file is not None
                lock_alone(self.data_file, self.path)
                inner = self._inner.begin(write=True, buffers=True)
                try:
                    transaction = Transaction(inner, self.path, None)
                    result = change(transaction)
                    with replacement(self.path / DATA) as file:
                        _fill(Path(file.name), transaction.entries(), self.path / DATA)
                        self._sweep()
                        before_switch()
                    self.rewritten += 1
                    sync_directory(self.path)
                    return result
                finally:
                    inner.abort()
                    self._reopen()  # also shares the file again


def _fill(file: Path, entries: Iterable[tuple[bytes, memoryview]], old: Path) -> None:
    """Put entries of the `old` file, in the order of their keys, into an empty one, which the
    caller syncs. LMDB's own compacting copies whole pages, with the deleted bytes in them. Raises
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
