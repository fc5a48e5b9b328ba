"""A cache in a directory: values read from the object store, as files, within a budget of bytes. It
survives restarts, is shared by processes, and may be deleted at any time.

A file is written under another name and renamed, so a reader sees all of it or none, without
waiting. A writer holds a lock on the file that counts the bytes, and counts before it writes; where
they would be too many, the files that were used longest ago are deleted. Values are not trusted:
the caller checks them, and drops damaged ones.
"""

import errno
import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

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
        self._lock = threading.Lock()
        self.evicted = 0
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

    def get_many(
        self, keys: Sequence[str], most: int, until: float = math.inf
    ) -> list[bytes | Failure | None]:
        """The values of some keys, of so many bytes each at most; of each None, or why it could not
        be read. until: as of Valkey; no file is waited for.
        """
        found: list[bytes | Failure | None] = []
        for key in keys:
            try:
                found.append(self.get(key, most))
            except Failure as failure:
                self.counter.failed(failure.reason)
                found.append(failure)
        return found

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values; those beyond the budget are passed over. Raises Failure."""
        fitting: list[tuple[str, bytes]] = []
        needed = 0
        for key, value in items:
            if needed + _pages(len(value)) <= self.budget:
                fitting.append((key, value))
                needed += _pages(len(value))
        if not fitting:
            return
        try:
            with self._counted() as count:
                used = count.read()
                if used + needed > self.budget:
                    used = self._sweep(int(self.budget * _KEPT) - needed)
                count.write(used + needed)  # also if this process ends here
                try:
                    for key, value in fitting:
                        used += _pages(len(value)) if self._new(key, value) else 0
                finally:
                    count.write(used)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            reason: Reason = "full" if full else "unreachable"
            self.counter.failed(reason)
            raise Failure(reason, f"{self.path}: {error.strerror}") from error

    def _new(self, key: str, value: bytes) -> bool:
        """Write a value; False where it is there already."""
        file = self._file(key)
        if os.path.exists(file):
            return False
        other = f"{file}.{os.getpid()}.{threading.get_ident()}"
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            with open(other, "wb", buffering=0) as opened:
                if opened.write(value) != len(value):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(other, file)
        except OSError:
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
            with self._counted() as count:
                count.write(max(0, count.read() - size))

    @property
    def used(self) -> int:
        """Bytes of the files, as counted."""
        with self._counted() as count:
            return count.read()

    def _file(self, key: str) -> str:
        name = blake2b(key.encode(), digest_size=20).hexdigest()
        return f"{self.path}/{name[:2]}/{name[2:]}"

    def _sweep(self, most: int) -> int:
        """Delete what was used longest ago until `most` bytes are left; return how many are."""
        found: list[tuple[float, int, str]] = []
        for folder in filter(os.DirEntry.is_dir, os.scandir(self.path)):
            for file in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    if "." not in file.name:
                        found.append((status.st_mtime, _pages(status.st_size), file.path))
                    elif time.time() - status.st_mtime > _LEFT:  # its writer has ended
                        os.unlink(file.path)
        total = sum(size for _, size, _ in found)
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
        """The count of bytes, locked as long as the block lasts."""
        file = os.open(self.path / _MARK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with self._lock:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield _Count(file)
        finally:
            os.close(file)


class _Count(NamedTuple):
    """The bytes of the files, in a file."""

    file: int

    def read(self) -> int:
        """The number."""
        data = os.pread(self.file, _USED.size, 0)
        return int(_USED.unpack(data)[0]) if len(data) == _USED.size else 0

    def write(self, value: int) -> None:
        """Store a number now."""
        os.pwrite(self.file, _USED.pack(value), 0)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
