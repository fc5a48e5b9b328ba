"""Threads that share the reading of a batch: the one that wants it, and a few that help it."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 4  # that work on one batch
_ALONE = 8  # batches that are done alone after one for which no other thread came in time


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Threads:
    """Threads for `share`, which start when they are first needed. All that share at the same time
    have the same ones to help them, and go on alone where these, or the cores, are busy. Unusable
    in a forked child.
    """

    def __init__(self, count: int | None = None) -> None:
        """count: threads that work on one batch at most, the caller's among them; by default one a
        core, up to four.
        """
        self.count = min(_MOST, cores()) if count is None else count
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._alone = 0  # batches to come that are done alone: the cores are busy

    def share(self, parts: Iterable[T], work: Callable[[T], None], threads: int) -> None:
        """Call work(part) once for every part, on this thread and on up to `threads` - 1 others,
        which take the parts in their order, each the next when it has done one.

        When it returns, in whatever way, no thread is at work on this any more. After an error no
        further part is taken, and the error of the first of the parts that failed is raised: the
        one that this thread alone would have met.
        """
        if threads < 2 or self.count < 2 or self._alone:
            self._alone = max(0, self._alone - (threads > 1))
            for part in parts:
                work(part)
            return
        batch = _Batch(parts, work)
        try:
            for _ in range(min(threads, self.count) - 1):
                if not self._submit(batch.help):
                    break
            batch.go_on()
        finally:
            try:
                batch.end()
            finally:
                batch.end()  # an interrupt may have come before it waited
        self._alone = 0 if batch.helped else _ALONE
        batch.raise_first()

    def _submit(self, help: Callable[[], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    max(1, self.count - 1), thread_name_prefix="memstore-disk"
                )
            try:
                self._pool.submit(help)
            except RuntimeError:  # the system gives no more threads, or the interpreter ends
                return False
            return True

    def close(self) -> None:
        """End the threads; more than once is the same as once. Who still shares goes on alone."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class _Batch(Generic[T]):
    """The parts of one call of `share`."""

    def __init__(self, parts: Iterable[T], work: Callable[[T], None]) -> None:
        self._parts: Iterator[T] = iter(parts)
        self._work = work
        # A lock of C, as an interrupt between taking one and the block it guards would keep it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._taken = 0
        self._helping = 0  # other threads that are at work
        self.helped = False  # another thread came in time
        self._ended = False
        self._errors: list[tuple[int, BaseException]] = []  # with the number of the part

    def help(self) -> None:
        """What another thread does. It may come too late, when all is done."""
        with self._lock:
            if self._ended:
                return
            self._helping += 1
            self.helped = True
        try:
            self.go_on()
        except BaseException as error:  # without it the part would pass for done
            self._errors.append((0, error))
        finally:
            with self._lock:
                self._helping -= 1
                self._changed.notify_all()

    def go_on(self) -> None:
        """Do one part after the other until there is none."""
        number = 0
        try:
            while True:
                with self._lock:
                    if self._ended or self._errors:
                        return
                    self._taken = number = self._taken + 1
                    try:
                        part = next(self._parts)
                    except StopIteration:
                        return
                self._work(part)
        except Exception as error:
            self._errors.append((number, error))

    def end(self) -> None:
        """Let no thread take another part, and wait until none is at work. An interrupt that comes
        meanwhile is raised afterwards.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._ended = True
                    while self._helping:
                        self._changed.wait()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def raise_first(self) -> None:
        """Raise the error of the first part that failed, if one did."""
        if self._errors:
            _, error = min(self._errors, key=lambda failed: failed[0])
            self._errors.clear()
            raise error
