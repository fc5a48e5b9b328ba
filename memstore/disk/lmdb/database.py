"""The tables of a memory's directory: what is done with them, in transactions, whichever process
does it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from memstore.closing import Closing
from memstore.disk.files import DATA, OWN_NAMES, named_os_errors
from memstore.disk.lmdb.environment import Environment, Version
from memstore.disk.lmdb.registry import acquire, release
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import InvalidInput, MemoryClosed, MemoryNotFound, ReadOnlyMemory
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
        return cls(acquire(path, lambda new: new.create(first, limit)), read_only=False)

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Self:
        """Open the memory in `path`, for reading; write takes the writer lock when it is called.

        The file's length is checked before anything of it is used. A memory in a directory or on a
        file system that cannot be written opens as if read_only were asked for.

        Raises MemoryNotFound, CorruptMemory (truncated or unreadable), InvalidInput (a network file
        system), ReadOnlyMemory (no permission to read), MemoryLocked (being compacted).
        """
        path = expanded(path)
        if not (path / DATA).is_file():
            raise MemoryNotFound.of(path)
        return cls(acquire(path), read_only=read_only)

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
        self._environment.set_limit(limit)

    @property
    def file_bytes(self) -> int:
        """Bytes of the data file; it never shrinks but by compact. Raises MemoryNotFound."""
        with suppress(FileNotFoundError):
            return os.stat(self.path / DATA).st_size
        raise self._environment.gone()

    @property
    def version(self) -> Version:
        """What is another after every commit, whichever process made it; cheap enough to be asked
        at every step.
        """
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

    def rewrite(
        self,
        change: Callable[[Transaction], T] | None = None,
        *,
        before_switch: Callable[[], None] = lambda: None,
    ) -> T | None:
        """Put a new file in the place of the data file, that holds what is stored and no byte of
        anything else; return what `change` returned.

        change: run first, as by `write`; what it deletes is in the new file nowhere.
        before_switch: called when the new file is there and has not yet taken the place.

        Needs the memory to itself and room for the new file; killed at any point, the old file or
        the new one is there, `change` and all. Raises MemoryLocked (another process has it open),
        StorageFull, ReadOnlyMemory, MemoryClosed, CorruptMemory.
        """

        with self.writer():
            return self._environment.rewrite(change or (lambda transaction: None), before_switch)

    def close(self) -> None:
        """Close; the last Database of a directory closes the environment. More than once is the
        same as once.
        """
        if not self._closed:
            self._closed = True
            if self._environment.pid == os.getpid():
                release(self._environment)

    def _check(self) -> None:
        if self._environment.pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._environment.pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")
