"""Who may write: several writers of one process write several documents, one writer a document;
other processes are kept out by the memory's writer lock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import MemoryLocked
from memstore.store.committed import Committed

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


@contextmanager
def written_here(committed: Committed, name: str, *, wait: bool) -> Iterator[None]:
    """Hold what writing under a name needs; what interrupted imports left goes first.

    wait: for another process that writes, instead of raising MemoryLocked. Raises MemoryLocked
    also, at once, where this process writes that document already; ReadOnlyMemory.
    """
    database = committed.catalog.database
    with name_held(database.path, name), database.writer(wait=wait):
        committed.refresh()
        remove_leftovers(committed, name)
        yield


def remove_leftovers(committed: Committed, name: str | None = None) -> None:
    """Delete what interrupted imports left, but nothing that this process is importing now; name:
    of the document that the caller is going to write. The caller holds the writer lock.
    """
    catalog = committed.catalog

    def left(row: Document | None) -> bool:
        now = names_written(catalog.database.path) - {name}
        return row is not None and row.state == "importing" and row.name not in now

    def delete(txn: Transaction) -> None:
        # An import that ends meanwhile commits before or after this transaction, so its row is
        # either ready or of a name that is still written.
        for number in there:
            if left(catalog.row(txn, number)):
                catalog.delete_document(txn, number)

    there = [row.id for row in committed.rows.hidden() if left(row)]
    if there:
        catalog.database.write(delete, beyond_limit=True)
