"""A cache in a directory: values read from the object store, as files, within a budget of bytes. It
survives restarts, is shared by processes, and may be deleted at any time.

A file is written under another name and renamed, so a reader sees all of it or none, without
waiting. A writer holds a lock on the file that counts the bytes, and counts before it writes; where
they would be too many, the files that were used longest ago are deleted. Values are not trusted:
the caller checks them, and drops damaged ones.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from memstore.errors import InvalidInput, StorageFull
from memstore.paths import expanded
from memstore.share.calls import Failure, Reason
from memstore.tiers.stats import TierCounter

_MARK = "memstore-cache"  # a file that says whose directory it is
_USED = struct.Struct("<Q")
_PAGE = 4096  # a file takes whole pages
_KEPT = 0.9  # of the budget that is left when files have to be deleted
_TOUCH = 60.0  # seconds after which a use is noted again
_LEFT = 300.0  # seconds after which a file that was never renamed belongs to no writer


class LocalCache:
    """Values by key in a directory. Safe for several threads and processes."""

    def __init__(self, path: Path | str, budget: int) -> None:
        """path: a directory of its own, made where there is none; budget: bytes of the values'
        files. Raises InvalidInput (a directory with other files, or that cannot be written),
        StorageFull.
        """
        self.path, self.budget = expanded(path), budget
        self.counter = TierCounter()
        self._lock = threading.RLock()
        self.evicted = 0
        self._folders: set[str] = set()  # that are there
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = self.path / _MARK
            if not mark.exists():
                others = sorted(os.listdir(self.path))
                if others and not mark.exists():  # another cache makes the mark before all else
                    raise InvalidInput(
                        f"{self.path} is not empty ({others[0]}); name a directory of its own for "
                        "the local cache"
                    )
                mark.touch(mode=0o600)  # empty: another process may have counted in it
            with mark.open("r+b") as file:  # may it be written?
                file.seek(0, os.SEEK_END)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    f"the local cache {self.path} is on a full disk; free some, or name another "
                    "directory"
                ) from error
            raise InvalidInput(
                f"the local cache {self.path} cannot be used ({error.strerror}); name another "
                "directory"
            ) from error

    def get(self, key: str, most: int) -> bytes | None:
        """A value, or None. Raises Failure: one of more than `most` bytes is removed unread."""
        file = self._file(key)
        try:
            with open(file, "rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                if status.st_size > most:
                    os.unlink(file)
                    raise Failure("damaged", f"{file} has more than {most:,} bytes")
                if time.time() - status.st_mtime > _TOUCH:
                    os.utime(opened.fileno())
                return opened.read(status.st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Failure("unreachable", f"{file}: {error.strerror}") from error

    def get_many(self, keys: Sequence[str], most: Sequence[int]) -> list[bytes | Failure | None]:
        """The values of some keys, of so many bytes each at most; of each None, or why it could not
        be read.
        """
        found: list[bytes | Failure | None] = []
        for key, size in zip(keys, most):
            try:
                found.append(self.get(key, size))
            except Failure as failure:
                self.counter.failed(failure.reason)
                found.append(failure)
        return found

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values; those beyond the budget are passed over. Raises Failure."""
        fitting: list[tuple[str, bytes, int]] = []
        room = self.budget
        for key, value in items:
            size = _pages(len(value))
            if size <= room:
                fitting.append((key, value, size))
                room -= size
        if not fitting:
            return
        try:
            with self._lock, self._counted() as count:
                needed = self.budget - room
                if count.value + needed > self.budget:
                    count.value = self._sweep(int(self.budget * _KEPT) - needed)
                count.write(count.value + needed)  # also if this process ends here
                for key, value, size in fitting:
                    count.value += size if self._write(key, value) else 0
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            reason: Reason = "full" if full else "unreachable"
            self.counter.failed(reason)
            raise Failure(reason, f"{self.path}: {error.strerror}") from error

    def _write(self, key: str, value: bytes) -> bool:
        """Write a value; False where it is there already."""
        file = self._file(key)
        if os.path.exists(file):
            return False
        folder = os.path.dirname(file)
        other = f"{file}.{os.getpid()}.{threading.get_ident()}"
        try:
            if folder not in self._folders:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                self._folders.add(folder)
            with open(other, "wb", buffering=0) as opened:
                if opened.write(value) != len(value):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(other, file)
        except OSError:
            self._folders.discard(folder)  # it may have been deleted
            with suppress(OSError):
                os.unlink(other)
            raise
        return True

    def drop(self, key: str) -> None:
        """Delete a value."""
        file = self._file(key)
        with suppress(OSError):
            size = _pages(os.stat(file).st_size)
            os.unlink(file)
            self._change(-size)

    @property
    def used(self) -> int:
        """Bytes of the files, as counted."""
        return self._change(0)

    def _file(self, key: str) -> str:
        name = blake2b(key.encode(), digest_size=20).hexdigest()
        return f"{self.path}/{name[:2]}/{name[2:]}"

    # The count, and what goes

    def _change(self, by: int) -> int:
        with self._lock, self._counted() as count:
            count.value = max(0, count.value + by)
            return count.value

    def _sweep(self, most: int) -> int:
        """Delete what was used longest ago until `most` bytes are left; return how many are."""
        found: list[tuple[float, int, str]] = []
        now, total = time.time(), 0
        for folder in os.scandir(self.path):
            if not folder.is_dir():
                continue
            for file in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    if "." in file.name:  # being written, or left by a writer that ended
                        if now - status.st_mtime > _LEFT:
                            os.unlink(file.path)
                        continue
                    found.append((status.st_mtime, _pages(status.st_size), file.path))
                    total += found[-1][1]
        for _, size, path in sorted(found):
            if total <= max(0, most):
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                self.evicted += 1
            total -= size
        return total

    @contextmanager
    def _counted(self) -> "Iterator[_Count]":
        """The count of bytes, under its lock as long as the block lasts."""
        file = os.open(self.path / _MARK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = os.pread(file, _USED.size, 0)
            count = _Count(file, _USED.unpack(data)[0] if len(data) == _USED.size else 0)
            try:
                yield count
            finally:
                count.write(count.value)
        finally:
            os.close(file)


@dataclass
class _Count:
    """The bytes of the files, in a file."""

    file: int
    value: int

    def write(self, value: int) -> None:
        """Store a number now."""
        os.pwrite(self.file, _USED.pack(value), 0)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
