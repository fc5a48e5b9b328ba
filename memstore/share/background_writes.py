"""Bounded background writes to caches: work that no caller waits for, in order, on one thread."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_QUEUED_BYTES = 64 << 20  # that wait to be written; more are not written


class BackgroundWrites:
    """A queue of writes. May be used by several threads."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._pool = ThreadPoolExecutor(1, "memstore-cache")
        self._waiting = 0  # bytes
        self._closed = False

    def add(self, work: Callable[[], object], size: int) -> None:
        """Queue work that holds `size` bytes until it has run, unless too many are waiting. What it
        raises is ignored.
        """

        def done(_: Future[object]) -> None:
            with self._lock:
                self._waiting -= size

        with self._lock:
            if self._closed or self._waiting + size > _QUEUED_BYTES:
                return
            try:
                queued = self._pool.submit(work)
            except RuntimeError:  # the interpreter ends, or the system gives no thread
                return
            self._waiting += size
        queued.add_done_callback(done)

    def settle(self) -> None:
        """Wait until everything queued is written."""
        if not self._closed:
            self._pool.submit(int).result()

    def close(self) -> None:
        """Write what is queued, and end; idempotent."""
        if self._pid == os.getpid():  # a fork has no such thread, and its lock may be held
            with self._lock:
                self._closed = True
            self._pool.shutdown()
