"""A data file that is filled again: what compacting and erasing put in the place of the old one.

It holds nothing but the given entries. LMDB's own compacting copies whole pages, with the deleted
bytes in them.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb

from memstore.disk.lmdb.transaction import COMMIT_KEY, COMMIT_TABLE, TABLES, commit_record

Entry = tuple[str, bytes, bytes | memoryview]  # table, key, value
_BATCH_BYTES = 16 << 20


def fill(file: Path, entries: Iterable[Entry], size: int) -> None:
    """Make the tables in an empty file and put entries into them, which come table by table and in
    the order of their keys; without the records of commits, which are made here. The caller syncs
    the file.

    size: bytes that the entries need at most. Raises lmdb.Error.
    """
    with lmdb.open(
        os.fsencode(file),
        subdir=False,
        lock=False,
        max_dbs=len(TABLES),
        map_size=size,
        sync=False,
        readahead=False,
    ) as environment:
        tables = {name: environment.open_db(name.encode(), create=True) for name in TABLES}
        # twice at least, since the last two commits are those that are checked
        for batch in (*_batches(entries), []):
            with environment.begin(write=True) as txn:
                for table, key, value in batch:
                    txn.put(key, value, db=tables[table], append=table != COMMIT_TABLE)
                txn.put(COMMIT_KEY, commit_record(txn.id()), db=tables[COMMIT_TABLE])


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[2])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch
