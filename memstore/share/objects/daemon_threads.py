"""Threads that nothing waits for: a request that hangs keeps neither Ctrl-C nor the end of the
process, for which concurrent.futures joins its own.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

AT_ONCE = 16  # requests


class Threads:
    """As a ThreadPoolExecutor, of daemon threads: they end when they are told to or it is gone."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._started = most, name, 0
        self._tasks = _Tasks()
        weakref.finalize(self, self._tasks.end).atexit = False

    def submit(self, work: Callable[..., T], *args: Any) -> "Future[T]":
        """Do this on one of them. Raises RuntimeError where the system gives no threads, or they
        have ended.
        """
        future: Future[T] = Future()
        with self._tasks.changed:
            if self._tasks.ended:
                raise RuntimeError("the threads have ended")
            if self._tasks.idle <= len(self._tasks.waiting) and self._started < self._most:
                self._start()
            self._tasks.waiting.append((future, work, args))
            self._tasks.changed.notify()
        return future

    def _start(self) -> None:
        name = f"{self._name}-{self._started}"
        try:
            threading.Thread(target=self._tasks.work, name=name, daemon=True).start()
            self._started += 1
        except RuntimeError:
            if not self._started:  # else one of those that there are does it
                raise

    def end(self) -> None:
        """Begin nothing more, and wait for nothing; more than once is the same as once."""
        self._tasks.end()


class _Tasks:
    """What is to be done: all that a thread knows, so that Threads can go while it waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())  # Threads may go at any instruction
        self.waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self.idle, self.ended = 0, False  # threads that wait for one
        self._pid = os.getpid()

    def work(self) -> None:
        """The work of a thread."""
        while True:
            with self.changed:
                while not self.waiting and not self.ended:
                    self.idle += 1
                    self.changed.wait()
                    self.idle -= 1
                if self.ended:
                    return
                future, work, args = self.waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args))
                except BaseException as error:
                    future.set_exception(error)
            del future, work, args

    def end(self) -> None:
        """Have the threads end; what was not begun is cancelled."""
        if self._pid != os.getpid():
            return  # they are not in a fork, where one of them may have the lock for good
        with self.changed:
            self.ended = True
            left = [*self.waiting]
            self.waiting.clear()
            self.changed.notify_all()
        for future, _, _ in left:
            future.cancel()


def at_once(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """The results of requests that are made side by side, in order; the first error is raised, and
    the rest not waited for.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    threads = Threads(min(AT_ONCE, len(items)), "memstore-share")
    try:
        return [future.result() for future in [threads.submit(work, item) for item in items]]
    finally:
        threads.end()
