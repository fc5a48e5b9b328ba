"""Directories that are removed when a `with` block ends, whenever an interrupt comes."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_directory(prefix: str = "memstore-") -> Iterator[Path]:
    """A new directory where the system has temporary ones. An interrupt that comes while it is
    removed does not leave half of it behind, as it does of the standard library's.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path, ignore_errors=True)
        except KeyboardInterrupt:
            shutil.rmtree(path, ignore_errors=True)
            raise
