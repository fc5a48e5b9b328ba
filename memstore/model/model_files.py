"""Files of a model's directory: their sizes, and what safetensors files hold."""

import os
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


def check_file(path: Path, most: int | None = None) -> int:
    """The size of a file. Raises InvalidWeights for one that is missing, is larger than `most`
    bytes, or is a Git LFS pointer.
    """
    try:
        size = path.stat().st_size
        is_pointer = size <= _POINTER_BYTES and path.read_bytes().startswith(_POINTER)
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error.strerror}") from None
    if most is not None and size > most:
        raise InvalidWeights(
            f"{path} has {size:,} bytes, more than the {most:,} that such a file may "
            "have; get the model's files again"
        )
    if is_pointer:
        raise InvalidWeights(
            f"{path} is a Git LFS pointer instead of the file itself; run `git lfs pull` in the "
            "model's directory, or download the file"
        )
    return size


def read_file(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """The bytes of a file of at most `most`. Raises InvalidWeights."""
    check_file(path, most)
    return path.read_bytes()


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
