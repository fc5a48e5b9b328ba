"""The names of the documents that this process is writing, by the memory's directory: a document is
written by one writer at a time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstore.errors import MemoryLocked

_written: dict[Path, set[str]] = {}
_changing = threading.Lock()
_ALL = "\0all"  # in the place of a name: no document may be written


def names_written(path: Path) -> frozenset[str]:
    """Names of the documents of a memory that this process is writing."""
    with _changing:
        return frozenset(_written.get(path.resolve(), ()))


@contextmanager
def name_held(path: Path, name: str) -> Iterator[None]:
    """Let nobody else of this process write under a name. Raises MemoryLocked, at once."""
    with _changing:
        names = _written.setdefault(path.resolve(), set())
        if name in names or _ALL in names:
            what = f"document {name!r}" if name in names else "what documents are found by"
            raise MemoryLocked(f"{what} is being written by this process; finish that first")
        names.add(name)
    try:
        yield
    finally:
        with _changing:
            names.discard(name)


@contextmanager
def all_names_held(path: Path) -> Iterator[None]:
    """Let nobody else of this process write any document of a memory. Raises MemoryLocked where one
    is being written.
    """
    with _changing:
        names = _written.setdefault(path.resolve(), set())
        if names:
            raise MemoryLocked(
                f"{path.resolve()} is being written by this process; finish that first"
            )
        names.add(_ALL)
    try:
        yield
    finally:
        with _changing:
            names.discard(_ALL)
