"""Who may do what at once: the gate inside a process, the writer lock between processes."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from memstore.disk.files import DATA, WRITER, mode_of, named_os_errors, open_regular
from memstore.errors import MemoryLocked


class Gate:
    """Transactions pass together; a change of the open file passes alone."""

    def __init__(self) -> None:
        # of C: an interrupt between taking it and what it guards cannot keep it
        self._changed = threading.Condition(threading.RLock())
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def passed(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._shut = True
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._shut = False
                self._changed.notify_all()


class WriterLock:
    """The lock that one process at a time holds to write; counted, so that it nests."""

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path / WRITER, os.getpid()
        self._mutex = threading.Lock()
        self._count = 0
        self.file: int | None = None

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock once more; yields whether it was not held. Raises MemoryLocked."""
        with self._mutex:
            first = not self._count
            if first:
                self.file = self._lock()
            self._count += 1
        try:
            yield first
        finally:
            if self._pid == os.getpid():  # not in a forked child that leaves the block
                self._release()

    def _lock(self) -> int:
        # Who may only read the memory could hold the lock for ever, if able to open it.
        data = mode_of(self._path.with_name(DATA)) or 0o600
        mode = data & (data & 0o222 | (data & 0o222) << 1)
        with named_os_errors(self._path.parent):
            file = open_regular(self._path, os.O_RDWR | os.O_CREAT, mode)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # For the message that others get; the lock itself ends with its holder.
            os.ftruncate(file, 0)
            with suppress(OSError):
                os.pwrite(file, b"%d\n" % os.getpid(), 0)
            return file
        except BaseException as error:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise MemoryLocked(
                f"{self._path.parent} is being written by process {holder}; try again when it is "
                "done"
            ) from None

    def _release(self) -> None:
        with self._mutex:
            self._count -= 1
            if not self._count and self.file is not None:
                file, self.file = self.file, None  # no interrupt has it closed again
                os.ftruncate(file, 0)
                # Unlock before closing: a forked child may still share the file.
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)
