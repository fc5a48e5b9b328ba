"""Where benchmarks make memories, and what the page cache holds of one."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_file(memory: Path) -> Path:
    """The file of a memory that its blocks lie in."""
    return memory / "data.mdb"


def drop_cache(memory: Path) -> None:
    """Let the page cache forget a memory's file; nobody may have it open."""
    os.sync()
    file = os.open(data_file(memory), os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """The directory --work, or a temporary one."""
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        yield options.work
        return
    with tempfile.TemporaryDirectory(prefix="memstore-benchmark-") as temporary:
        yield Path(temporary)
