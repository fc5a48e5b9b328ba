"""Files of a model's directory: regular ones, links to such included, of a bounded size, whose
weights find room in this machine's memory.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from memstore.errors import InvalidWeights

SETTINGS_BYTES = 16 << 20  # of config.json and its like
TOKENIZER_BYTES = 256 << 20  # of the largest known 33 MB
_MOST_TENSORS = 1 << 20
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # of Git LFS


@dataclass(frozen=True)
class Stored:
    """What the headers of weights say of them."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: frozenset[str]

    @property
    def numbers(self) -> int:
        """How many there are in all."""
        total = 0
        for shape in self.shapes.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


def check_file(path: Path, most: int | None = None) -> int:
    """The size of a regular file. Raises InvalidWeights for what is none (a pipe or a device may
    give bytes for ever, or wait for ever), for a file larger than `most` bytes, and for a Git LFS
    pointer.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidWeights(f"{path} is no regular file; get the model's files again")
    if most is not None and status.st_size > most:
        raise InvalidWeights(
            f"{path} has {status.st_size:,} bytes, more than the {most:,} that such a file may "
            "have; get the model's files again"
        )
    if status.st_size <= _POINTER_BYTES and _begins_with(path, _POINTER):
        raise InvalidWeights(
            f"{path} is a Git LFS pointer instead of the file itself; run `git lfs pull` in the "
            "model's directory, or download the file"
        )
    return status.st_size


def _begins_with(path: Path, text: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(text)) == text
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None


def read_file(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """The bytes of a regular file of at most `most`. Raises InvalidWeights."""
    check_file(path, most)
    try:
        # what was checked may have been replaced by a pipe since
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise InvalidWeights(f"{path} has more than {most:,} bytes; get the model's files again")
    return data


def stored(files: Iterable[Path]) -> Stored:
    """What the headers of safetensors files say; nothing of the weights is read. Raises
    InvalidWeights.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: set[str] = set()
    size = 0
    for path in files:
        size += check_file(path)
        try:
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                shapes |= {name: tuple(part.get_shape()) for name, part in slices.items()}
                dtypes |= {part.get_dtype() for part in slices.values()}
        except (SafetensorError, OSError) as error:
            raise InvalidWeights(
                f"{path} is truncated or not a safetensors file: {error}"
            ) from None
        if len(shapes) > _MOST_TENSORS:
            raise InvalidWeights(f"{path} has more than {_MOST_TENSORS:,} tensors")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory > 0:
            raise InvalidWeights(
                f"{path}: the weights have {size:,} bytes, this machine has {memory:,} of memory; "
                "take a smaller model, or a larger machine"
            )
    return Stored(shapes, frozenset(dtypes))
