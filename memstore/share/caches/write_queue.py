"""Work that nobody waits for."""

import os
import queue
import threading
from collections.abc import Callable

_BEHIND_BYTES = 64 << 20  # that wait to be kept in the caches; beyond, they are not kept
_LAST = 5.0  # seconds that a cache has at the end, which may hang


class WriteQueue:
    """Work that nobody waits for, in its order, on a thread of its own; what would wait with too
    many bytes is left undone.
    """

    def __init__(self, most: int = _BEHIND_BYTES) -> None:
        """most: bytes that may wait."""
        self._most = most
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bytes
        self._closed = False
        self.dropped = 0  # bytes that were left undone

    def add(self, work: Callable[[], None], size: int) -> None:
        """Do this some time; size: bytes that it holds meanwhile."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            if self._closed or self._waiting + size > self._most:
                self.dropped += size
                return
            self._waiting += size
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="memstore-behind", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # the system gives no more threads
                    self._thread = None
                    self.dropped += size
                    self._waiting -= size
                    return
        self._queue.put((work, size))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, size = item
            try:
                work()
            except Exception:  # what a cache does not keep is read again
                self.dropped += size
            finally:
                with self._lock:
                    self._waiting -= size

    def settle(self) -> None:
        """Wait until all of it is done."""
        if self._pid == os.getpid() and self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put((done.set, 0))
            done.wait()

    def close(self) -> None:
        """Do what waits, as far as it takes a few seconds, and end; more than once is the same as
        once.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_LAST)
