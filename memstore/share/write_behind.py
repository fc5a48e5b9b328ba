"""Bounded background writes of records to the caches above the object store, in order.

A cache that fails is counted and passed over; what it does not hold is read again from the store.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from memstore.disk.format.record import RECORD_FORMAT
from memstore.disk.read.batch import Wanted
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock
from memstore.share.calls import Failure
from memstore.share.local_cache import LocalCache
from memstore.share.valkey import Valkey

_QUEUED_BYTES = 64 << 20  # records that wait to be written; more are not written
_LAST = 5.0  # seconds that closing waits for a cache that may hang

Found = tuple[Wanted, memoryview]
"""A record of a batch, and its bytes."""


def record_names(signature: bytes, records: Sequence[Wanted]) -> list[str]:
    """The keys of records in every cache. A key identifies the content: the model, the write that
    made the record (of a passage the digest of its tokens), the layer and the block.
    """
    start = f"memstore:{RECORD_FORMAT}:{signature.hex()}:"
    return [f"{start}{(write or b'').hex()}:{key[2]}:{key[1]}" for _, key, write, _ in records]


class WriteBehind:
    """Writes records to the local and the shared cache on a background thread, in order. Records
    that would make the queue too large are not written. May be used by several threads.
    """

    def __init__(self, table: BlockTable, local: LocalCache | None, shared: Valkey | None) -> None:
        self._table, self._signature = table, table.form.signature
        self._local, self._shared = local, shared
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bytes
        self._closed = False

    def keep(self, found: Sequence[Found], *, shared: bool) -> None:
        """Store records that were read; shared: in the shared cache, too."""
        to_shared = shared and self._shared is not None
        if not found or (self._local is None and not to_shared):
            return
        items = [(record, bytes(data)) for record, data in found if self._is_whole(record, data)]
        size = sum(len(data) for _, data in items)
        self._add(lambda: self._put(items, to_shared), size)

    def keep_made(self, make: Callable[[], Sequence[tuple[Wanted, bytes]]], size: int) -> None:
        """Store records in all caches that are encoded first; size: bytes they are made of."""
        self._add(lambda: self._put(make(), self._shared is not None), size)

    def drop(self, name: str, record: Wanted) -> None:
        """Delete a damaged record from the cache of this name."""
        cache = self._local if name == "local" else self._shared
        assert cache is not None
        self._add(partial(cache.drop, *record_names(self._signature, [record])), 0)

    def _is_whole(self, record: Wanted, data: memoryview) -> bool:
        """Are all heads of a record right? Those that were wanted were checked."""
        _, key, write, places = record
        if len(places) == self._table.geometry.num_kv_heads:
            return True
        try:
            self._table.check(data, key, write)
        except CorruptBlock:
            return False
        return True

    def _put(self, items: Sequence[tuple[Wanted, bytes]], to_shared: bool) -> None:
        names = record_names(self._signature, [record for record, _ in items])
        named = [(name, data) for name, (_, data) in zip(names, items)]
        for cache in (self._local, self._shared if to_shared else None):
            if cache is not None:
                with suppress(Failure):  # the cache counts it
                    cache.put(named)

    # The queue

    def _add(self, work: Callable[[], None], size: int) -> None:
        """Queue work that holds `size` bytes until it has run."""
        with self._lock:
            if self._closed or self._waiting + size > _QUEUED_BYTES:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="memstore-behind", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads
                    return
                self._thread = thread
            self._waiting += size
        self._queue.put((work, size))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, size = item
            with suppress(Exception):  # a cache never fails a read
                work()
            with self._lock:
                self._waiting -= size

    def settle(self) -> None:
        """Wait until everything queued is written."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put((done.set, 0))
            done.wait()

    def close(self) -> None:
        """Write what is queued for a few seconds at most, and end; idempotent."""
        if self._pid != os.getpid():  # a fork has no such thread, and its lock may be held
            return
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_LAST)
