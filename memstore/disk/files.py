"""The files of a memory: their names, opening and locking them, what file system they lie on, and
what the system's errors mean.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from memstore.errors import InvalidInput, MemoryLocked, ReadOnlyMemory, StorageFull

DATA, LOCK, WRITER, INDEX = "data.mdb", "lock.mdb", "writer.lock", "index"
OWN_NAMES = {DATA, LOCK, WRITER, INDEX}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)

# Memory maps and locks of one machine are not seen by another, so a shared memory there would be
# damaged.
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "lustre", "beegfs",
    "gpfs", "ocfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse",
    "fuse.ceph", "fuse.mfs",
}  # fmt: skip


def occupy_standard_streams() -> None:
    """Open nothing in the place of a standard stream that is closed: a file that got its descriptor
    would take what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
            os.set_inheritable(nothing, True)


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file that lies there itself; return the descriptor. A link in a directory from
    elsewhere may lead anywhere, and opening a pipe may wait for ever. What is opened for writing
    must have no other name. Raises InvalidInput, OSError.
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
    """Refuse to write what is somebody else's file, too. Raises InvalidInput."""
    if os.fstat(file).st_nlink > 1:
        raise InvalidInput(
            f"{path} is also another file (a hard link), which writing would change; give the "
            "memory files of its own (cp -r)"
        )


_BEGUN = re.compile(r"memstore-[0-9a-f]{16}\.partial")  # what `replacement` begins


def sweep(directory: Path) -> None:
    """Remove the files of a directory that processes began which were killed."""
    with suppress(OSError):
        for name in filter(_BEGUN.fullmatch, os.listdir(directory)):
            with suppress(OSError, InvalidInput):
                file = open_regular(directory / name, os.O_RDONLY)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not if it is being written
                    os.unlink(directory / name)
                finally:
                    os.close(file)


_INDEX_FILE = re.compile(r"(layer-\d+|passages)\.idx")


def remove_index(path: Path) -> None:
    """Remove the index files of a memory, which are made again from what it holds. Raises
    OSError.
    """
    directory = path / INDEX
    if directory.is_dir() and not directory.is_symlink():
        for name in filter(_INDEX_FILE.fullmatch, os.listdir(directory)):
            os.unlink(directory / name)
        sync_directory(directory)


def mode_of(path: Path) -> int | None:
    """Who may read and write a regular file; None where there is none."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode) & 0o666
    return None


def check_outside_memories(path: Path) -> None:
    """Refuse to write what a user named into a memory's directory, where nothing else belongs.
    Raises InvalidInput.
    """
    there = Path(os.path.realpath(path.parent))
    for folder in (there, there.parent):  # it has folders of its own, one level deep
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
    """A new file, of a name that nobody knows before, that takes the place of `path` once the block
    has ended; nothing of it is left where the block fails. Raises OSError, which names `path`.

    It is locked until then, which tells it from what a killed process left there: that is removed
    first. It has the mode of the file whose place it takes; where there is none, that of `like`, or
    `mode`.
    """
    sweep(path.parent)
    try:
        while True:
            name = path.parent / f"memstore-{secrets.token_hex(8)}.partial"
            with open(name, "xb", opener=lambda at, flags: os.open(at, flags, 0o600)) as out:
                with suppress(OSError):  # an export may lie where there are no locks
                    fcntl.flock(out, fcntl.LOCK_EX)
                if not name.exists():  # swept before it was locked
                    continue
                with suppress(PermissionError):  # where files have no modes
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
    """Open the data file, to read places of it, and mark it as in use; return the descriptor.
    Raises MemoryLocked, InvalidInput.
    """
    while True:
        file = open_regular(data, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if lies_at(data, file):
                if hasattr(os, "posix_fadvise"):
                    # read what is asked for, nothing around it
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
                return file
            os.close(file)  # compacted in between: another file has taken its place
        except BlockingIOError:
            os.close(file)
            raise MemoryLocked(
                f"{data.parent} is being compacted; try again when that is done"
            ) from None


def lies_at(path: Path, file: int) -> bool:
    """Is an open file the one that lies at a path?"""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False


def take_room(path: Path, size: int, mode: int) -> None:
    """Have a regular file, new or not, hold its bytes on the disk, `size` of them at least. Raises
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
    """Lock a data file that is shared against every other process. Raises MemoryLocked, if another
    has it open.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
        raise MemoryLocked(
            f"{path} is open in another process; rewriting its file needs it alone"
        ) from None


def sync_directory(path: Path) -> None:
    """Have the names in a directory reach the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def storage_full(path: Path, what: object) -> StorageFull:
    """The error for a disk that has no room."""
    return StorageFull(
        f"{path} could not be written ({what}): the disk is full, or a size limit is reached; "
        "make room and try again, what was committed is intact"
    )


@contextmanager
def named_os_errors(path: Path) -> Iterator[None]:
    """What the system says of a memory's directory, as errors that say what to do."""
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


def check_local(path: Path) -> None:
    """Refuse a directory on a network file system. Raises InvalidInput."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):  # where the system does not say
        for line in Path("/proc/self/mountinfo").read_bytes().decode("latin-1").splitlines():
            mount, _, source = line.partition(" - ")
            kind = source.split()[0]
            if mount.split()[2] == number and kind in NETWORK:
                raise InvalidInput(
                    f"{path} is on a network file system ({kind}); keep the memory on a local disk"
                )
