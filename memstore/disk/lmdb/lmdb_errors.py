"""What LMDB's errors mean to who has a memory."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from memstore.disk.files import NO_PERMISSION, NO_SPACE, storage_full
from memstore.errors import CorruptMemory, MemoryLocked, MemstoreError, ReadOnlyMemory, StorageFull

MAX_READERS = 512


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
