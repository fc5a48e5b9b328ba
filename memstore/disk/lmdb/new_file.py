"""A data file that is filled anew: what compacting and erasing put in the old one's place.

Nothing is in it but what it was filled with. LMDB's own compacting copies pages whole, with what
was deleted from them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import lmdb

from memstore.disk.lmdb.transaction import COMMIT_KEY, COMMIT_TABLE, TABLES, Commit

Entry = tuple[str, bytes, bytes | memoryview]  # table, key, value
_BATCH_BYTES = 16 << 20
_MAP = 64 << 20


def fill(file: Path, entries: Iterable[Entry], committed: float) -> None:
    """Make the tables in an empty file and put entries into them, faster where those of a table
    come in order. The file is the caller's to bring to the disk.

    committed: the time that its commits record. Raises lmdb.Error.
    """
    with lmdb.open(
        os.fsencode(file),
        subdir=False,
        lock=False,
        max_dbs=len(TABLES),
        map_size=_MAP,
        sync=False,
        readahead=False,
    ) as inner:
        new = _NewFile(inner, committed)
        batch: list[Entry] = []
        size = 0
        for entry in entries:
            batch.append(entry)
            size += len(entry[2])
            if size >= _BATCH_BYTES:
                new.put(batch)
                batch, size = [], 0
        new.put(batch)
        new.put([])  # as the last two commits are those that are recorded


class _NewFile:
    def __init__(self, inner: lmdb.Environment, committed: float) -> None:
        self._inner, self._committed = inner, committed
        self._tables = {name: inner.open_db(name.encode(), create=True) for name in TABLES}
        self._last = dict.fromkeys(TABLES, b"")  # a table's greatest key

    def put(self, batch: list[Entry]) -> None:
        while True:
            try:
                with self._inner.begin(write=True) as txn:
                    self._last = self._put(txn, batch)
                return
            except lmdb.MapFullError:
                self._inner.set_mapsize(2 * self._inner.info()["map_size"])

    def _put(self, txn: lmdb.Transaction, batch: list[Entry]) -> dict[str, bytes]:
        record = Commit(txn.id(), self._committed).pack()
        entries = [*batch, (COMMIT_TABLE, COMMIT_KEY, record)]
        last = dict(self._last)
        for table, key, value in entries:
            append = key > last[table]
            txn.put(key, value, db=self._tables[table], append=append)
            last[table] = max(key, last[table])
        return last
