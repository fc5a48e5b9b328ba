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


def names_written(path: Path) -> frozenset[str]:
    """Names of the documents of a memory that this process is writing."""
    with _changing:
        return frozenset(_written.get(path.resolve(), ()))


@contextmanager
def name_held(path: Path, name: str) -> Iterator[None]:
    """Let nobody else of this process write under a name. Raises MemoryLocked, at once."""
    with _changing:
        names = _written.setdefault(path.resolve(), set())
        if name in names:
            raise MemoryLocked(
                f"document {name!r} is being written by this process; finish that first"
            )
        names.add(name)
    try:
        yield
    finally:
        with _changing:
            names.discard(name)
