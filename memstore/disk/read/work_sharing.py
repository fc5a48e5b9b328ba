"""Threads that share the reading of a batch: the caller's, and a few that help it."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_MOST = 4  # that work on one batch


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Threads:
    """Threads for `share`, which start when they are first needed. Calls at the same time share
    the same threads. Unusable in a forked child.
    """

    def __init__(self, count: int | None = None) -> None:
        """count: threads that work on one batch at most, the caller's among them; by default one a
        core, up to four.
        """
        self.count = min(_MOST, cores()) if count is None else count
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(max(1, self.count - 1), thread_name_prefix="memstore-disk")

    def share(self, parts: Iterable[T], work: Callable[[T], None], threads: int) -> None:
        """Call work(part) once for every part, on this thread and on up to `threads` - 1 others,
        which take the parts in their order, each the next when it has done one.

        When it returns, in whatever way, no thread is at work on this any more. After an error no
        further part is taken, and one of the errors is raised.
        """
        coming: Iterator[T] = iter(parts)
        taking = threading.Lock()
        ended = threading.Event()

        def go_on() -> None:
            try:
                while True:
                    with taking:
                        part = None if ended.is_set() else next(coming, None)
                    if part is None:
                        return
                    work(part)
            finally:
                ended.set()

        helping: list[Future[None]] = []
        try:
            for _ in range(min(threads, self.count) - 1):
                try:
                    helping.append(self._pool.submit(go_on))
                except RuntimeError:  # closed, or the system gives no more threads
                    break
            go_on()
        finally:
            ended.set()
            _wait_for([one for one in helping if not one.cancel()])
        for one in helping:
            if not one.cancelled():
                one.result()

    def close(self) -> None:
        """End the threads; idempotent. A call that still shares goes on alone."""
        if self._pid == os.getpid():
            self._pool.shutdown()


def _wait_for(working: list[Future[None]]) -> None:
    """Wait for threads that write into the caller's slots; an interrupt is raised afterwards."""
    try:
        wait(working)
    except BaseException:
        _wait_for(working)
        raise
