"""Bounded background writes: work that no caller waits for, in order, on one thread."""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

_QUEUED_BYTES = 64 << 20  # that wait to be written; more are not written
_LAST = 5.0  # seconds that closing waits for a write that may hang


class BackgroundWrites:
    """A queue of writes to caches. May be used by several threads."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], int] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bytes
        self._closed = False

    def add(self, work: Callable[[], object], size: int) -> None:
        """Queue work that holds `size` bytes until it has run, unless too many are waiting. What it
        raises is ignored.
        """
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
