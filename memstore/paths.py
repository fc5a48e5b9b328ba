"""Paths as users write them, and files of models, which may be missing or not fetched."""

import errno
import os
from pathlib import Path

from memstore.errors import InvalidInput, InvalidWeights

_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # of Git LFS


def expanded(path: Path | str) -> Path:
    """A path with a leading ~ or ~user replaced by that user's home directory.

    A shell does this only at the beginning of a word: not in --store=~/x, Python or JSON. Raises
    InvalidInput, also for a path that is too long for its file system.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InvalidInput(f"a path is a str or a pathlib.Path without NUL, not {path!r:.50}")
    full = Path(os.path.expanduser(path))
    try:
        full.lstat()
    except UnicodeEncodeError:
        raise InvalidInput(f"{str(full)!r:.50} cannot be a path; rename it") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidInput(f"{str(full)[:50]}... is too long for a path; shorten it") from None
    return full


def check_fetched(path: Path) -> None:
    """Raises InvalidWeights for a file that cannot be read or is a Git LFS pointer."""
    try:
        small = path.is_file() and path.stat().st_size <= _POINTER_BYTES
        is_pointer = small and path.read_bytes().startswith(_POINTER)
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None
    if is_pointer:
        raise InvalidWeights(
            f"{path} is a Git LFS pointer instead of the file itself; run `git lfs pull` in the "
            "model's directory, or download the file"
        )


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises InvalidWeights."""
    check_fetched(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None
