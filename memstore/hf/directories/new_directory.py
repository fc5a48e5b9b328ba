"""A directory that is filled before it, or what is in it, takes its place."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory of a new name, which is removed when the block ends, unless it was moved; what
    killed processes left of such names is removed first. Raises OSError.
    """
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it is another's, or gone
            held = os.open(left, _DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not if it is being written
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)
    made, held = _new_directory(parent, prefix)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _new_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """One, locked; its descriptor."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            held = os.open(made, _DIRECTORY)
            with suppress(OSError):  # it may lie where there are no locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if made.exists():  # not removed before it was locked
                return made, held
            os.close(held)
