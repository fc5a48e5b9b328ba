"""The database of a memory's directory: transactions by any number of threads and processes.

All Database objects of one directory in a process share one LMDB environment; a forked child
cannot use its parent's.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import lmdb

from memstore.closing import Closing
from memstore.disk.files import (
    DATA,
    check_free,
    check_one_name,
    lies_at,
    named_os_errors,
    occupy_standard_streams,
    sweep_memory,
)
from memstore.disk.lmdb.environment import Environment
from memstore.disk.lmdb.pages import Tree, read_meta
from memstore.disk.lmdb.transaction import (
    COMMIT,
    Transaction,
    Version,
    commit_record,
    named_lmdb_errors,
)
from memstore.errors import (
    CorruptMemory,
    MemoryClosed,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    ReadOnlyMemory,
)
from memstore.paths import expanded

T = TypeVar("T")


class Database(Closing):
    """The tables of one memory directory. Usable from several threads; a context manager."""

    def __init__(self, environment: Environment, *, read_only: bool) -> None:
        """Use Database.create or Database.open."""
        self._environment = environment
        self._asked_read_only = read_only
        self._closed = False

    @classmethod
    def create(cls, path: Path | str, first: Callable[[Transaction], None]) -> Self:
        """Make a database with what `first` writes, in one transaction, in a directory that is
        absent or empty.

        Raises MemoryExists, InvalidInput (other files there; a network file system),
        ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        path = expanded(path)
        with named_os_errors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_free(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise ReadOnlyMemory(
                f"{path} cannot be written; choose another directory or change its permissions"
            )
        return cls(_acquire(path, first), read_only=False)

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Self:
        """Open the memory in `path`; `write` takes the writer lock.

        The file is checked before it is mapped. A directory or file system without permission to
        write opens as with read_only.

        Raises MemoryNotFound, CorruptMemory (truncated or unreadable), InvalidInput (a network file
        system), ReadOnlyMemory (no permission to read), MemoryLocked (being compacted).
        """
        path = expanded(path)
        if not (path / DATA).is_file():
            raise MemoryNotFound.of(path)
        return cls(_acquire(path), read_only=read_only)

    @property
    def path(self) -> Path:
        """The memory's directory."""
        return self._environment.path

    @property
    def read_only(self) -> bool:
        """Whether writing is refused, by the caller or by the directory's permissions."""
        return self._asked_read_only or not self._environment.writable

    @property
    def file_bytes(self) -> int:
        """Bytes of the data file, which only `rewrite` shrinks. Raises MemoryNotFound."""
        with suppress(FileNotFoundError):
            return os.stat(self.path / DATA).st_size
        raise self._environment.gone()

    @property
    def version(self) -> Version:
        """Changes with every commit of any process; cheap enough to read at every step."""
        self._check()
        environment = self._environment
        with environment.gate.passed():
            return Version(environment.rewritten, environment.inner.info()["last_txnid"])

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction: a snapshot. Keep it short: while it is open, freed pages of the file
        are not reused.

        Inside another transaction of the same thread, it is that transaction. Never waits for a
        writer. Raises MemoryClosed, CorruptMemory, MemoryLocked (too many readers).
        """
        self._check()
        environment = self._environment
        current: Transaction | None = getattr(environment.thread, "transaction", None)
        if current is not None:
            yield current
            return
        with named_lmdb_errors(self.path):
            inner = self._begin(write=False)
            try:
                while (tree := self._tree(seen := inner.id())) is None:
                    inner.abort()
                    inner = environment.inner.begin(buffers=True)
                    if inner.id() == seen:  # not two commits since
                        raise CorruptMemory(
                            f"{self.path}: another program changed the open file, or the file is "
                            "damaged; close it, then run verify"
                        )
                environment.thread.transaction = Transaction(inner, self.path, tree)
                yield environment.thread.transaction
            finally:
                environment.thread.transaction = None
                self._end(inner)

    def _tree(self, transaction: int) -> Tree | None:
        """The key tree that a transaction sees; None if two commits have followed it. Raises
        CorruptMemory.
        """
        file, page_size = self._environment.data_file, self._environment.page_size
        assert file is not None
        try:
            meta = read_meta(file, transaction % 2 * page_size)
        except OSError as error:
            raise CorruptMemory(
                f"{self.path} cannot be read ({error}); check the disk, then run verify"
            ) from error
        if meta is None or meta.transaction != transaction:
            return None
        return Tree(file, page_size, meta.root)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a write transaction, commit, and return its result; an exception from it
        rolls everything back and propagates.

        Takes the writer lock unless `writer` holds it. Raises MemoryClosed, ReadOnlyMemory,
        MemoryLocked, StorageFull (the memory is unchanged), CorruptMemory.
        """
        with self.writer():
            return self._write(work)

    def _write(self, work: Callable[[Transaction], T]) -> T:
        environment = self._environment
        with environment.write_mutex, named_lmdb_errors(self.path):
            inner = self._begin(write=True)
            environment.thread.transaction = Transaction(inner, self.path, None)
            try:
                result = work(environment.thread.transaction)
                inner.put(COMMIT, commit_record(inner.id()))
                inner.commit()
                return result
            finally:
                environment.thread.transaction = None
                self._end(inner)

    def _begin(self, *, write: bool) -> Any:
        """Enter the gate and begin a transaction; leave the gate on any error."""
        environment, gate, reopened = self._environment, self._environment.gate, False
        while True:
            gate.enter()
            try:
                return environment.inner.begin(write=write, buffers=True)
            # unusable after a failed write or a failed reopening, or the file outgrew the map
            except (lmdb.PanicError, lmdb.MapResizedError, AttributeError):
                gate.leave()
                if reopened:
                    raise
                reopened = True
                with gate.alone():
                    environment.reopen()
            except lmdb.ReadersFullError:
                gate.leave()
                if not environment.inner.reader_check():  # no slot of a dead reader was freed
                    raise
            except BaseException:
                gate.leave()
                raise

    def _end(self, inner: Any) -> None:
        # in a forked child, abort would end the parent's transaction
        if self._environment.pid == os.getpid():
            inner.abort()  # no effect after a commit
            self._environment.gate.leave()

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Hold the writer lock, so that no other process writes. May be nested, and shared by
        threads.

        Raises MemoryLocked with the holder's process id; ReadOnlyMemory; MemoryNotFound (the
        directory was removed); MemoryClosed.
        """
        self._check()
        environment = self._environment
        if self.read_only:
            raise ReadOnlyMemory(
                f"{self.path} is open for reading only, or cannot be written; nothing was changed"
            )
        if not (self.path / DATA).exists():
            raise environment.gone()
        if getattr(environment.thread, "transaction", None) is not None:
            raise RuntimeError(
                "writing inside a transaction of the same thread: end that one first"
            )
        with environment.lock.held() as first:
            if not _lies_at(self.path, environment):
                raise environment.gone()
            if first:
                if environment.data_file is not None:
                    check_one_name(self.path / DATA, environment.data_file)
                sweep_memory(self.path)
            yield

    @property
    def names_written(self) -> frozenset[str]:
        """Names of the documents that this process is writing."""
        return frozenset(self._environment.names_written)

    @contextmanager
    def name_written(self, name: str) -> Iterator[None]:
        """Lock a document's name against other writers of this process. Raises MemoryLocked."""
        names, own = self._environment.names_written, object()
        if names.setdefault(name, own) is not own:
            raise MemoryLocked(
                f"document {name!r} is being written by this process; finish that first"
            )
        try:
            yield
        finally:
            del names[name]

    def rewrite(
        self,
        change: Callable[[Transaction], T] | None = None,
        *,
        before_switch: Callable[[], None] = lambda: None,
    ) -> T | None:
        """Replace the data file by a new one with the stored data and no byte of deleted data;
        return the result of `change`.

        change: run first, as by `write`; its deletions leave no bytes in the new file.
        before_switch: called when the new file is complete, before it replaces the old one.

        Needs disk space for the new file, and no other process may have the memory open. A kill
        at any point leaves the old file or the new one, with or without the whole change. Raises
        MemoryLocked, StorageFull, ReadOnlyMemory, MemoryClosed, CorruptMemory.
        """
        work: Callable[[Transaction], T | None] = change or (lambda transaction: None)
        with self.writer(), self._environment.write_mutex:
            with self.read():
                pass  # beginning reopens an environment that a failed write left unusable
            return self._environment.rewrite(work, before_switch)

    def close(self) -> None:
        """Close; the last Database of a directory closes the environment. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._environment.pid == os.getpid():
                _release(self._environment)

    def _check(self) -> None:
        if self._environment.pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._environment.pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")


# The environments that this process has open

_lock = threading.Lock()
_open: dict[tuple[int, int], Environment] = {}  # by device and inode of the directory


def _lies_at(path: Path, environment: Environment) -> bool:
    """Is the open data file the one in the directory `path`? True if none is open."""
    with environment.gate.passed():  # not while the file is replaced
        return environment.data_file is None or lies_at(path / DATA, environment.data_file)


def _acquire(path: Path, first: Callable[[Transaction], None] | None = None) -> Environment:
    """The process's environment for a directory; opened, or with `first` made, if there is none."""
    with _lock:
        occupy_standard_streams()
        with named_os_errors(path):
            status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        environment = _open.get(key)
        if environment is not None and environment.pid != os.getpid():
            raise MemoryClosed(
                f"{path} was open when this process was forked; open it in one that is spawned "
                "instead"
            )
        if environment is not None and not _lies_at(path, environment):
            environment = None  # the directory was removed, and its inode reused
        if environment is None:
            environment = Environment(path)
            try:
                with nullcontext() if first is None else environment.lock.held():
                    environment.open(create=first is not None)
                    if first is not None:
                        Database(environment, read_only=False)._write(first)
            except BaseException:
                environment.close()
                raise
            _open[key] = environment
        elif first is not None:
            raise MemoryExists(f"{path} already holds a memory; open it, or name another directory")
        environment.users += 1
        return environment


def _release(environment: Environment) -> None:
    with _lock:
        environment.users -= 1
        if not environment.users:
            for key in [key for key, other in _open.items() if other is environment]:
                del _open[key]
            environment.close()


def _forget_parent() -> None:
    """In a forked child: close its copies of the parent's locks, or they would outlive the parent.
    The environments stay open: closing them would end the parent's reads.
    """
    global _lock
    _lock = threading.Lock()
    for environment in _open.values():
        for file in (environment.data_file, environment.lock.file):
            if file is not None:
                os.close(file)
        environment.data_file = environment.lock.file = None


os.register_at_fork(after_in_child=_forget_parent)
