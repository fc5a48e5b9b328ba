"""What passages are found by in two stages, in files beside a memory: `passages.idx`, the head, and
`passages.lists`, the parts, which are mapped.
"""

import os
from pathlib import Path

import numpy as np

from memstore.disk.files import sweep
from memstore.errors import InvalidInput
from memstore.index.file_parts import MappedFile
from memstore.index.index_file import Unusable, content_of, new_file, refusals
from memstore.index.passage_files import HEAD, Digested, Made

_PARTS = "passages.lists"


class PassageDirectory:
    """The directory `index` of a memory as a Place of passage_files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """See Place."""
        return str(self._path)

    @property
    def stamp(self) -> tuple[int, int] | None:
        """See Place."""
        try:
            status = os.stat(self._path / HEAD)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def head(self) -> np.ndarray:
        """See Place."""
        return content_of(self._path / HEAD)

    def parts(self, size: int) -> MappedFile:
        """See Place."""
        try:
            return MappedFile(self._path / _PARTS, size)
        except InvalidInput as error:
            raise Unusable(str(error)) from error

    def write(self, made: Made) -> int:
        """See Place."""
        if not self._path.is_symlink():
            sweep(self._path)
        with refusals(self._path):
            # one takes its place right behind the other: a full disk leaves those that were
            with new_file(self._path / _PARTS) as file, new_file(self._path / HEAD) as head:
                parts = Digested(made)
                file.writelines(part.data for part in parts)
                head.writelines(parts.head())
            return sum((self._path / name).stat().st_size for name in (HEAD, _PARTS))
