"""A cache in a directory: what was read from afar, as files, within a budget of bytes. It survives
restarts, is shared by processes, and may be deleted at any time.

A file is written under another name and renamed, so whoever reads sees all of it or none, and waits
for nobody. Who writes holds a lock on the file that has the count of bytes, and has counted before
anything is written; where they would be too many, those that were used longest ago go. What is read
is not trusted: whoever asked checks it, and drops what is damaged.
"""

import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from memstore.errors import InvalidInput, StorageFull
from memstore.paths import expanded
from memstore.share.calls.failures import Failure
from memstore.share.format.rollback import Seen

try:
    import fcntl
except ImportError:  # not a POSIX system: one process uses the directory
    fcntl = None  # type: ignore[assignment]

_MARK = "memstore-cache"  # a file that says whose directory it is
_USED = struct.Struct("<Q")
_NEWEST = struct.Struct("<Q16s")  # number and id of a manifest
_PAGE = 4096  # what a file takes, it takes in these
_KEPT = 0.9  # of the budget, that is left when some has to go
_TOUCH = 60.0  # seconds after which a use is noted again
_LEFT = 300.0  # seconds after which a file that was never renamed is nobody's


class LocalCache:
    """Values by key in a directory. Safe for several threads and processes."""

    def __init__(self, path: Path | str, budget: int) -> None:
        """path: a directory of its own, made where there is none; budget: bytes of the values'
        files. Raises InvalidInput (a directory with other files, or that cannot be written),
        StorageFull.
        """
        self.path, self.budget = expanded(path), budget
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
                mark.touch(mode=0o600)  # empty: another may have counted in it meanwhile
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
        """A value of `most` bytes at most, or None. Raises Failure: what is larger, or no regular
        file, is not read, and removed.
        """
        file = self._file(key)
        try:
            with open(file, "rb", buffering=0, opener=_open_at_once) as opened:
                told = os.fstat(opened.fileno())
                if not stat.S_ISREG(told.st_mode) or told.st_size > most:
                    os.unlink(file)
                    raise Failure("damaged", f"{file} is none of {most:,} bytes at most")
                if time.time() - told.st_mtime > _TOUCH:
                    os.utime(opened.fileno())
                return opened.read(told.st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Failure("unreachable", f"{file}: {error.strerror}") from error

    def has(self, key: str) -> bool:
        """Is there a value, whatever it is?"""
        return os.path.exists(self._file(key))

    def get_many(self, keys: Sequence[str], most: Sequence[int]) -> list[bytes | Failure | None]:
        """The values of some keys, of so many bytes each at most; of each None, or why it could not
        be read.
        """
        found: list[bytes | Failure | None] = []
        for key, size in zip(keys, most):
            try:
                found.append(self.get(key, size))
            except Failure as failure:
                found.append(failure)
        return found

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Keep values; those beyond the budget are passed over. Raises Failure."""
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
                self._make_room(count, self.budget - room)
                before = count.value
                count.write(before + self.budget - room)  # also if this process ends here
                count.value = before
                for key, value, size in fitting:
                    count.value += size if self._write(key, value) else 0
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise Failure(
                "full" if full else "unreachable", f"{self.path}: {error.strerror}"
            ) from error

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
        """Keep a value no longer."""
        file = self._file(key)
        with suppress(OSError):
            size = _pages(os.stat(file).st_size)
            os.unlink(file)
            self._change(-size)

    def newest(self, identity: str) -> Seen | None:
        """The newest manifest of an object store that was noted, or None."""
        with suppress(OSError), self._lock, self._counted():
            return self._read_newest(self._newest_file(identity))
        return None

    def note_newest(self, identity: str, seen: Seen, *, anew: bool) -> None:
        """Remember a manifest, if it is newer than the one that is remembered, or anew."""
        file = self._newest_file(identity)
        with suppress(OSError), self._lock, self._counted():  # a full disk remembers nothing
            before = self._read_newest(file)
            if anew or before is None or before[0] < seen[0]:
                opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    os.pwrite(opened, _NEWEST.pack(*seen), 0)
                finally:
                    os.close(opened)

    def _newest_file(self, identity: str) -> str:
        return f"{self.path}/newest-{blake2b(identity.encode(), digest_size=20).hexdigest()}"

    def _read_newest(self, file: str) -> Seen | None:
        with suppress(FileNotFoundError), open(file, "rb", opener=_open_at_once) as opened:
            told = opened.read(_NEWEST.size)
            return _NEWEST.unpack(told) if len(told) == _NEWEST.size else None
        return None

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

    def _make_room(self, count: "_Count", needed: int) -> None:
        """Have room for so many bytes, of the budget at most."""
        if count.value + needed > self.budget:
            count.value = self._sweep(int(self.budget * _KEPT) - needed)

    def _sweep(self, most: int) -> int:
        """Delete what was used longest ago until `most` bytes are left; return how many are."""
        found: list[tuple[float, int, str]] = []
        now, total = time.time(), 0
        for folder in os.scandir(self.path):
            if not folder.is_dir():
                continue
            for file in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    told = file.stat()
                    if "." in file.name:  # somebody is writing it, or was
                        if now - told.st_mtime > _LEFT:
                            os.unlink(file.path)
                        continue
                    found.append((told.st_mtime, _pages(told.st_size), file.path))
                    total += found[-1][1]
        for _, size, path in sorted(found):
            if total <= max(0, most):
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                self.evicted += 1
            total -= size
        return total

    def _counted(self) -> "_Count":
        return _Count(self.path / _MARK)


class _Count:
    """The number in a file, under its lock as long as the block lasts."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self.value = 0

    def __enter__(self) -> "_Count":
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        told = os.pread(self._file, _USED.size, 0)
        self.value = self._read = _USED.unpack(told)[0] if len(told) == _USED.size else 0
        return self

    def write(self, value: int) -> None:
        """Change it now."""
        self.value = self._read = value
        os.pwrite(self._file, _USED.pack(value), 0)

    def __exit__(self, *args: object) -> None:
        try:
            if self.value != self._read:
                self.write(self.value)
        finally:
            os.close(self._file)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe, too


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
