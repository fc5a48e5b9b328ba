"""Files of an index: a header and arrays of bytes, with checksums, replaced whole. A file is a
cache: it is read only if it is whole and of this kind, and deleting it loses nothing.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgpack
import msgspec
import numpy as np
import xxhash

from memstore.decode import Count, unpack
from memstore.disk.files import DATA, NO_SPACE, mode_of, open_regular, replacement
from memstore.errors import InvalidInput, ReadOnlyMemory, StorageFull

_MAGIC = b"memstore index 2\n"
_FIXED = len(_MAGIC) + 16  # then the header's length and its checksum


class Unusable(Exception):
    """An index file that is damaged, of another kind, or of other keys; says which."""


class Parts(msgspec.Struct):
    """Fields of every header; each kind has more."""

    lengths: list[Count]
    payload: bytes


H = TypeVar("H", bound=Parts)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Turn any error about a file's content, in our code or in FAISS, into Unusable; InvalidInput
    (FAISS is missing) stays.
    """
    try:
        yield
    except (Unusable, InvalidInput):
        raise
    except Exception as error:
        raise Unusable(f"{name} is not understood ({error})") from error


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file of an index, which takes the place of `path` once the block has ended. Raises
    OSError.
    """
    data = path.parent.with_name(DATA)  # the index is as private as what it is of
    if not path.parent.exists():
        mode = mode_of(data) or 0o600
        path.parent.mkdir(mode=0o700)
        path.parent.chmod(mode | 0o100 | (mode & 0o044) >> 2)
    if path.parent.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(path.parent))
    with replacement(path, like=data) as file:
        yield file


@contextmanager
def refusals(directory: Path) -> Iterator[None]:
    """Turn the system's errors of writing an index into StorageFull or ReadOnlyMemory."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageFull(
                f"{directory}: no room for the index; make room and run it again"
            ) from error
        raise ReadOnlyMemory(f"{directory} cannot be written: {error.strerror}") from error


def encode_file(header: dict[str, Any], parts: Sequence[np.ndarray]) -> list[bytes | memoryview]:
    """The bytes of a file, in pieces; parts: contiguous."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    packed = msgpack.packb(
        header | {"lengths": [part.nbytes for part in parts], "payload": digest.digest()}
    )
    size, checksum = len(packed).to_bytes(8, "little"), xxhash.xxh3_64(packed).digest()
    return [_MAGIC + size + checksum + packed, *(part.data for part in parts)]


def write_file(path: Path, header: dict[str, Any], parts: Sequence[np.ndarray]) -> None:
    """Write a file; parts: contiguous. Raises OSError."""
    with new_file(path) as file:
        file.writelines(encode_file(header, parts))


def content_of(path: Path) -> np.ndarray:
    """All bytes of a file, uint8, a mapped copy. Raises Unusable (it is empty, or no regular file),
    FileNotFoundError, OSError.
    """
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except (InvalidInput, ValueError) as error:
        raise Unusable(str(error)) from error


def read_file(path: Path, form: type[H]) -> tuple[H, list[np.ndarray]]:
    """The checked header and the parts, uint8 [n] each. Raises Unusable, FileNotFoundError,
    OSError.
    """
    return decode_file(path.name, content_of(path), form)


def decode_file(name: str, content: np.ndarray, form: type[H]) -> tuple[H, list[np.ndarray]]:
    """The same, of a file's content. Raises Unusable."""
    header, end = decode_header(name, content, form)
    payload = content[end:]
    if (
        len(payload) != sum(header.lengths)
        or xxhash.xxh3_64(payload.data).digest() != header.payload
    ):
        raise Unusable(f"{name} is damaged")
    return header, np.split(payload, np.cumsum(header.lengths)[:-1])


def decode_header(name: str, content: np.ndarray, form: type[H]) -> tuple[H, int]:
    """The checked header, and where it ends. Raises Unusable."""
    if len(content) < _FIXED or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise Unusable(f"{name} is damaged, or of another version")
    end = _FIXED + int.from_bytes(content[len(_MAGIC) : len(_MAGIC) + 8].tobytes(), "little")
    packed = content[_FIXED:end].tobytes()
    if xxhash.xxh3_64(packed).digest() != content[len(_MAGIC) + 8 : _FIXED].tobytes():
        raise Unusable(f"{name} is damaged")
    with understood(name):
        return unpack(packed, form), end
