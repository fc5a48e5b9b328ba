"""A data file that is filled again: what compacting and erasing put in the place of the old one.

It holds nothing but the given entries. LMDB's own compacting copies whole pages, with the deleted
bytes in them.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import lmdb

from memstore.disk.lmdb.transaction import COMMIT, commit_record

Entry = tuple[bytes, memoryview]  # key, value
_BATCH_BYTES = 16 << 20


def fill(file: Path, entries: Iterable[Entry], size: int) -> None:
    """Put entries, which come in the order of their keys, into an empty file; without the record of
    a commit, which is made here. The caller syncs the file.

    size: bytes that the entries need at most. Raises lmdb.Error.
    """
    with lmdb.open(
        os.fsencode(file), subdir=False, lock=False, map_size=size, sync=False, readahead=False
    ) as environment:
        # twice at least, since the last two commits are those that are checked
        for batch in chain(_batches(entries), [[]]):
            with environment.begin(write=True) as txn:
                for key, value in batch:
                    txn.put(key, value, append=True)
                txn.put(COMMIT, commit_record(txn.id()))


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch
