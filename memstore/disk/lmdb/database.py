"""The tables of a memory's directory: what is done with them, in transactions, whichever process
does it. All Database objects of one directory in a process share one LMDB environment, and a forked
child has none of its parent's.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from memstore.closing import Closing
from memstore.disk.files import DATA, OWN_NAMES, named_os_errors
from memstore.disk.lmdb.environment import Environment, Version
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import (
    InvalidInput,
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

    def __init__(self, environment: "Environment", *, read_only: bool) -> None:
        """Use Database.create or Database.open."""
        self._environment = environment
        self._asked_read_only = read_only
        self._closed = False

    @classmethod
    def create(
        cls, path: Path | str, first: Callable[[Transaction], None], *, limit: int | None = None
    ) -> Self:
        """Make the tables and what `first` writes, in one transaction, in a directory that is
        absent or empty.

        limit: bytes the data file may reach.

        Raises MemoryExists, InvalidInput (other files there; a network file system),
        ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        path = expanded(path)
        with named_os_errors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = sorted({entry.name for entry in path.iterdir()} - OWN_NAMES)
        if others:
            raise InvalidInput(
                f"{path} is not empty ({others[0]}); name a new directory for the memory"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ReadOnlyMemory(
                f"{path} cannot be written; choose another directory or change its permissions"
            )
        return cls(_acquire(path, lambda new: new.create(first, limit)), read_only=False)

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Self:
        """Open the memory in `path`; write takes the writer lock when it is called.

        The file's length is checked before anything of it is used. A memory in a directory or on a
        file system that cannot be written opens as if read_only were asked for.

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
        """Whether writing is refused: asked for at opening, or the directory cannot be written."""
        return self._asked_read_only or not self._environment.writable

    @property
    def limit(self) -> int | None:
        """Bytes that the data file may reach; None for no bound. Set once for every Database of
        this directory.
        """
        return self._environment.limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._check()
        if limit != self._environment.limit:
            self._environment.set_limit(limit)

    @property
    def file_bytes(self) -> int:
        """Bytes of the data file; it never shrinks but by compact. Raises MemoryNotFound."""
        with suppress(FileNotFoundError):
            return os.stat(self.path / DATA).st_size
        raise self._environment.gone()

    @property
    def version(self) -> Version:
        """Differs after every commit, whichever process made it; cheap enough for every step."""
        self._check()
        return self._environment.version()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction: a snapshot. Keep it for one batch: while it is open, the file's pages
        are not reused.

        Inside another transaction of the same thread it is that transaction. Never waits for a
        writer. Raises MemoryClosed, CorruptMemory, MemoryLocked (too many readers).
        """
        self._check()
        with self._environment.read() as transaction:
            yield transaction

    def write(self, work: Callable[[Transaction], T], *, beyond_limit: bool = False) -> T:
        """Run `work` in a write transaction, commit, and return what it returned: all of it is
        stored, or nothing.

        `work` is run again from the start when the map had to grow, so it must not change anything
        but the transaction (compute its counts inside, and return them). An exception from it
        undoes the batch and passes on.

        The writer lock is taken for the call if `writer` does not hold it. beyond_limit: allow a
        little more than `limit`, for deletions, which need room too. Raises MemoryClosed,
        ReadOnlyMemory, MemoryLocked, StorageFull (the memory is as it was), CorruptMemory.
        """
        with self.writer():
            return self._environment.write(work, beyond_limit=beyond_limit)

    @contextmanager
    def writer(self, *, wait: bool = False) -> Iterator[None]:
        """Hold the writer lock: no other process writes meanwhile. May be nested, and shared by
        threads.

        Raises MemoryLocked with the holder's process id, or waits for it; ReadOnlyMemory;
        MemoryNotFound (the directory is gone); MemoryClosed.
        """
        self._check()
        if self.read_only:
            raise ReadOnlyMemory(
                f"{self.path} is open for reading only, or cannot be written; nothing was changed"
            )
        if not (self.path / DATA).exists():
            raise self._environment.gone()
        self._environment.acquire_writer(wait=wait)
        try:
            yield
        finally:
            if self._environment.pid == os.getpid():
                self._environment.lock.release()

    @property
    def names_written(self) -> frozenset[str]:
        """Names of the documents that this process is writing."""
        with self._environment.names_lock:
            return frozenset(self._environment.names_written)

    @contextmanager
    def name_written(self, name: str) -> Iterator[None]:
        """Let nothing else of this process write under a document's name. Raises MemoryLocked."""
        names, lock = self._environment.names_written, self._environment.names_lock
        with lock:
            if name in names:
                raise MemoryLocked(
                    f"document {name!r} is being written by this process; finish that first"
                )
            names.add(name)
        try:
            yield
        finally:
            with lock:
                names.discard(name)

    def rewrite(
        self,
        change: Callable[[Transaction], T] | None = None,
        *,
        before_switch: Callable[[], None] = lambda: None,
    ) -> T | None:
        """Replace the data file by a new one, that holds what is stored and no byte of anything
        else; return what `change` returned.

        change: run first, as by `write`; the new file holds nothing that it deletes. before_switch:
        called when the new file is complete and has not yet replaced the old one.

        Needs the memory to itself and room for the new file; killed at any point, the old file or
        the new one is there, `change` and all. Raises MemoryLocked (another process has it open),
        StorageFull, ReadOnlyMemory, MemoryClosed, CorruptMemory.
        """

        with self.writer():
            return self._environment.rewrite(change or (lambda transaction: None), before_switch)

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
# Of a forked child's parent: kept, and not opened again, since closing them would end the parent's
# reading.
_inherited: dict[tuple[int, int], Environment] = {}


def _acquire(path: Path, create: Callable[[Environment], None] | None = None) -> Environment:
    """The process's environment for a directory; if it has none yet, a new one that is opened, or
    created by `create`.
    """
    with _lock:
        with named_os_errors(path):
            status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        environment = _open.get(key)
        if key in _inherited:
            raise MemoryClosed(
                f"{path} was open when this process was forked; open it in one that is spawned "
                "instead"
            )
        if environment is not None and not environment.lies_at(path):
            environment = None  # of a directory that was removed: its inode was given out again
        if environment is None:
            environment = Environment(path)
            environment.open() if create is None else create(environment)
            _open[key] = environment
        elif create is not None:
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
    """In a forked child: close the parent's locks, which the child would otherwise keep alive after
    it.
    """
    global _lock
    _lock = threading.Lock()
    _inherited.update(_open)
    for environment in _open.values():
        for file in (environment.data_file, environment.lock.file):
            if file is not None:
                os.close(file)
        environment.data_file = environment.lock.file = None
    _open.clear()


os.register_at_fork(after_in_child=_forget_parent)
