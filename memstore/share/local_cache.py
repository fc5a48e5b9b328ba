"""A cache of values from the object store, as files in a directory with a budget of bytes. It
survives restarts, is shared by processes, and may be deleted at any time.

A file is written under another name and renamed, so that readers see all of it or none. Whenever a
process has written an eighth of the budget, it sums up the files and deletes those used longest
ago; so each process may exceed the budget by an eighth. Callers check all values, and drop damaged
ones.
"""

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from memstore.disk.files import NO_SPACE
from memstore.errors import InvalidInput
from memstore.paths import expanded
from memstore.tiers.slots import TierCounter

_SUFFIX = ".cached"  # of its files; other files are ignored
_LEFT = 300.0  # seconds after which a file that was never renamed is abandoned


class LocalCache:
    """Values by key in a directory. Safe for several threads and processes."""

    def __init__(self, path: Path | str, budget: int) -> None:
        """path: a directory, made if it does not exist; budget: bytes of all files. Raises
        InvalidInput (it cannot be written).
        """
        self.path, self.budget = expanded(path), budget
        self.counter = TierCounter()
        self._lock = threading.Lock()
        self._room = 0  # bytes that may be written before the next sweep
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()  # is it writable?
        except OSError as error:
            raise InvalidInput(
                f"the local cache {self.path} cannot be used ({error.strerror}); name another "
                "directory"
            ) from error

    def get_many(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        """The values of keys; None for a missing one, and for one of more than `most` bytes, which
        is removed unread.
        """
        return [self._get(self._file(key), most) for key in keys]

    def _get(self, file: str, most: int) -> bytes | None:
        try:
            with open(file, "rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                if status.st_size > most:
                    os.unlink(file)
                    self.counter.failed("damaged")
                    return None
                os.utime(opened.fileno())
                return opened.read(status.st_size)
        except FileNotFoundError:
            return None
        except OSError:
            self.counter.failed("unavailable")
            return None

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values, except those that are too large; failures are counted."""
        with self._lock:
            for key, value in items:
                file, size = self._file(key), len(value)
                if size > self.budget or os.path.exists(file):
                    continue
                try:
                    if size > self._room:
                        self._room = max(size, self.budget // 8)
                        self._sweep(self.budget - self._room)
                    self._write(file, value)
                except OSError as error:
                    self.counter.failed("full" if error.errno in NO_SPACE else "unavailable")
                    return
                self._room -= size

    def _write(self, file: str, value: bytes) -> None:
        other = f"{file}.{os.getpid()}.{threading.get_ident()}"
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            with open(other, "wb") as opened:
                opened.write(value)
            os.rename(other, file)
        except OSError:
            with suppress(OSError):
                os.unlink(other)
            raise

    def drop(self, key: str) -> None:
        """Delete a value."""
        with suppress(OSError):
            os.unlink(self._file(key))

    def _file(self, key: str) -> str:
        name = blake2b(key.encode(), digest_size=20).hexdigest()
        return f"{self.path}/{name[:2]}/{name[2:]}{_SUFFIX}"

    def _sweep(self, most: int) -> None:
        """Delete the least recently used files until `most` bytes are left."""
        found: list[tuple[float, int, Path]] = []
        for file in self.path.glob(f"??/*{_SUFFIX}*"):
            with suppress(OSError):
                status = file.stat()
                if file.suffix == _SUFFIX:
                    found.append((status.st_mtime, status.st_size, file))
                elif time.time() - status.st_mtime > _LEFT:  # abandoned
                    file.unlink()
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= most:
                break
            with suppress(OSError):
                file.unlink()
            total -= size
