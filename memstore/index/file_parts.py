"""Parts of something that is large, each under a checksum, read as they are asked for: from a file
that is mapped here, or from elsewhere.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.disk.files import open_regular
from memstore.errors import CorruptMemory
from memstore.index.index_file import Unusable


class FilePart(NamedTuple):
    """Where a part lies."""

    start: int  # byte
    length: int  # bytes
    digest: int  # XXH3-64 of them


class PartReader(Protocol):
    """What parts are read from."""

    def read(self, parts: Sequence[FilePart]) -> list[np.ndarray]:
        """The bytes of parts, uint8 each, checked; all at the same time where that is faster.
        Raises CorruptMemory, StoreUnavailable.
        """


class MappedFile:
    """A file of this machine. Safe for several threads."""

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes that it must have. Raises Unusable, InvalidInput (no regular file),
        FileNotFoundError, OSError.
        """
        self._path = path
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise Unusable(f"{path.name} is not the one that was written with the others")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._content = np.frombuffer(mapped, np.uint8)

    def read(self, parts: Sequence[FilePart]) -> list[np.ndarray]:
        """See PartReader."""
        found = []
        for start, length, digest in parts:
            found.append(self._content[start : start + length])
            if xxh3_64_intdigest(found[-1].data) != digest:
                raise CorruptMemory(f"{self._path} is damaged; run `memstore index`")
        return found


class StoredParts:
    """Numbered parts, one behind the other."""

    def __init__(
        self, reader: PartReader, lengths: np.ndarray, digests: np.ndarray, start: int = 0
    ) -> None:
        """lengths: int64 [n], bytes; digests: uint64 [n]; start: where the first begins."""
        self._reader, self._lengths, self._digests = reader, lengths, digests
        self._starts = start + np.cumsum(lengths) - lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Parts by number: see PartReader."""
        wanted = [
            FilePart(int(self._starts[n]), int(self._lengths[n]), int(self._digests[n]))
            for n in numbers
        ]
        found = iter(self._reader.read([part for part in wanted if part.length]))
        return [next(found) if part.length else np.zeros(0, np.uint8) for part in wanted]
