"""The files of a memory: names, opening, locks and file system checks; and errors of the system as
memstore's own.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from memstore.errors import InvalidInput, MemoryLocked, ReadOnlyMemory, StorageFull

DATA, LOCK, WRITER, INDEX = "data.mdb", "lock.mdb", "writer.lock", "index"
_OWN_NAMES = {DATA, LOCK, WRITER, INDEX}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)

# Machines do not see each other's memory maps and locks there, so several would damage a memory.
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "lustre", "beegfs",
    "gpfs", "ocfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse",
    "fuse.ceph", "fuse.mfs",
}  # fmt: skip


def occupy_standard_streams() -> None:
    """Open /dev/null for each closed standard stream; otherwise a data file could get its
    descriptor, and printed text would go into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            os.set_inheritable(nothing, True)


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file; return the descriptor. Refuses symbolic links, which may point anywhere;
    pipes, whose opening may block; and writing a file that has other hard links. Raises
    InvalidInput, OSError.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_file(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _no_file(path)
        if flags & (os.O_RDWR | os.O_WRONLY):
            check_one_name(path, file)
    except BaseException:
        os.close(file)
        raise
    return file


def check_one_name(path: Path, file: int) -> None:
    """Refuse to write a file with other hard links. Raises InvalidInput."""
    if os.fstat(file).st_nlink > 1:
        raise InvalidInput(
            f"{path} is also another file (a hard link), which writing would change; give the "
            "memory files of its own (cp -r)"
        )


_BEGUN = re.compile(r"memstore-[0-9a-f]{16}\.partial")  # temporary files of `replacement`


def sweep(directory: Path) -> None:
    """Remove temporary files that killed processes left in a directory."""
    with suppress(OSError):
        for name in filter(_BEGUN.fullmatch, os.listdir(directory)):
            with suppress(OSError, InvalidInput):
                file = open_regular(directory / name, os.O_RDONLY)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails during a write
                    os.unlink(directory / name)
                finally:
                    os.close(file)


def sweep_memory(path: Path) -> None:
    """Call `sweep` for a memory's directory and for its index directory."""
    sweep(path)
    if not (path / INDEX).is_symlink():
        sweep(path / INDEX)


_INDEX_FILE = re.compile(r"(layer-\d+|passages)\.idx")


def remove_index(path: Path) -> None:
    """Remove a memory's index files, which can be rebuilt. Raises OSError."""
    directory = path / INDEX
    if directory.is_dir() and not directory.is_symlink():
        for name in filter(_INDEX_FILE.fullmatch, os.listdir(directory)):
            os.unlink(directory / name)
        sync_directory(directory)


def mode_of(path: Path) -> int | None:
    """The permission bits of a regular file; None if there is none."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode) & 0o666
    return None


def check_outside_memories(path: Path) -> None:
    """Refuse an output path inside a memory's directory. Raises InvalidInput."""
    there = Path(os.path.realpath(path.parent))
    for folder in (there, there.parent):  # a memory has subfolders, one level deep
        if os.path.lexists(folder / DATA):
            raise InvalidInput(
                f"{path} lies in the directory of a memory, {folder}; name a file outside of it"
            )


def _no_file(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} is a link, or no regular file, and a memory's files are regular ones; remove it, "
        "or copy the memory with the files themselves"
    )


@contextmanager
def replacement(path: Path, like: Path | None = None, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` when the block ends, and is removed if the block fails.
    Raises OSError, which names `path`.

    A lock distinguishes it from files that killed processes left, which are removed first. It gets
    the mode of the file that it replaces, else that of `like`, else `mode`.
    """
    sweep(path.parent)
    try:
        while True:
            name = path.parent / f"memstore-{secrets.token_hex(8)}.partial"
            with open(name, "xb", opener=lambda at, flags: os.open(at, flags, 0o600)) as out:
                with suppress(OSError):  # an export's file system may have no locks
                    fcntl.flock(out, fcntl.LOCK_EX)
                if not name.exists():  # removed by a sweep before it was locked
                    continue
                with suppress(PermissionError):  # file systems without modes
                    os.fchmod(out.fileno(), mode_of(path) or mode_of(like or path) or mode)
                yield out
                out.flush()
                os.fsync(out.fileno())
                os.replace(name, path)
                return
    except BaseException as error:
        with suppress(OSError):
            name.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def share(data: Path, *, create: bool) -> int:
    """Open the data file for reading and lock it as in use; return the descriptor. Raises
    MemoryLocked, InvalidInput.
    """
    while True:
        file = open_regular(data, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if lies_at(data, file):
                if hasattr(os, "posix_fadvise"):
                    # no readahead: reads are at random places
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
                return file
            os.close(file)  # replaced by a concurrent compaction
        except BlockingIOError:
            os.close(file)
            raise MemoryLocked(
                f"{data.parent} is being compacted; try again when that is done"
            ) from None


def lies_at(path: Path, file: int) -> bool:
    """Whether the descriptor `file` is open on the file that is now at `path`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False


def take_room(path: Path, size: int, mode: int) -> None:
    """Create a regular file if it does not exist, and allocate at least `size` bytes for it. Raises
    InvalidInput, OSError.
    """
    file = open_regular(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        status = os.fstat(file)
        size = max(size, status.st_size)
        if hasattr(os, "posix_fallocate") and 512 * status.st_blocks < size:
            os.posix_fallocate(file, 0, size)
    finally:
        os.close(file)


def lock_alone(file: int, path: Path) -> None:
    """Upgrade the lock on a data file to an exclusive one. Raises MemoryLocked if another process
    has it open.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
        raise MemoryLocked(
            f"{path} is open in another process; close it there, then try again"
        ) from None


class WriterLock:
    """The lock of the only process that writes; it is counted, so that it nests."""

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path / WRITER, os.getpid()
        self._mutex = threading.Lock()
        self._count = 0
        self.file: int | None = None

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock; yields whether this is the outermost hold. Raises MemoryLocked."""
        with self._mutex:
            first = not self._count
            if first:
                self.file = self._lock()
            self._count += 1
        try:
            yield first
        finally:
            if self._pid == os.getpid():  # not in a forked child
                self._release()

    def _lock(self) -> int:
        # the data file's mode: a user who may only read the memory must not hold the lock
        data = mode_of(self._path.with_name(DATA)) or 0o600
        mode = data & (data & 0o222 | (data & 0o222) << 1)
        with named_os_errors(self._path.parent):
            file = open_regular(self._path, os.O_RDWR | os.O_CREAT, mode)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process id is only for the message to others; the lock ends with its holder
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
                file, self.file = self.file, None  # an interrupt cannot close it twice
                os.ftruncate(file, 0)
                # Unlock before closing: a forked child may still share the file.
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def storage_full(path: Path, what: object) -> StorageFull:
    """The error for a full disk."""
    return StorageFull(
        f"{path} could not be written ({what}): the disk is full, or a size limit is reached; "
        "make room and try again, what was committed is intact"
    )


@contextmanager
def named_os_errors(path: Path) -> Iterator[None]:
    """Translate the system's errors about a memory's directory into errors with advice."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidInput(f"{path} is not a directory; name a directory for the memory") from error
    except OSError as error:
        if error.errno in NO_PERMISSION:
            raise ReadOnlyMemory(
                f"{path} cannot be used ({error.strerror}); check its permissions"
            ) from error
        if error.errno in NO_SPACE:
            raise storage_full(path, error.strerror) from error
        raise


def check_free(path: Path) -> None:
    """Refuse a directory with other files than a memory's. Raises InvalidInput, ReadOnlyMemory."""
    with named_os_errors(path):
        others = sorted({entry.name for entry in path.iterdir()} - _OWN_NAMES)
    if others:
        raise InvalidInput(
            f"{path} is not empty ({others[0]}); name a new directory for the memory"
        )


def check_local(path: Path) -> None:
    """Refuse a directory on a network file system. Raises InvalidInput."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):  # a system without this table
        for line in Path("/proc/self/mountinfo").read_bytes().decode("latin-1").splitlines():
            mount, _, source = line.partition(" - ")
            kind = source.split()[0]
            if mount.split()[2] == number and kind in NETWORK:
                raise InvalidInput(
                    f"{path} is on a network file system ({kind}); keep the memory on a local disk"
                )
