"""Calls to another machine: in parallel, never later than a deadline, and not made at all for some
seconds after the machine did not answer.

They run on daemon threads: a request that hangs delays neither Ctrl-C nor the end of the process,
while concurrent.futures would join its threads.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Literal, TypeVar

from memstore.tiers.stats import TierCounter

T = TypeVar("T")
Item = TypeVar("Item")

Reason = Literal[
    "late",  # no answer before the deadline
    "unreachable",  # no connection, it broke, or the server answered with an error
    "denied",  # no credentials, or not these
    "missing",  # it lacks an object that a manifest names
    "damaged",  # not the bytes that were asked for
    "closed",  # not asked: it did not answer lately, or is closed
    "full",  # no room to write
]
_ANSWERED = frozenset({"missing", "damaged", "denied"})  # reasons of a server that does answer
_SKIPPED = 5.0  # seconds that a server is skipped after it did not answer
_AT_ONCE = 16  # requests
_PIECE = 0.5  # seconds


class Failure(Exception):
    """A read or write of a tier that failed; inside this room only."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(what)
        self.reason: Reason = reason


class Calls:
    """Calls to one tier. May be used by several threads."""

    def __init__(self, counter: TierCounter, *, threads: int = _AT_ONCE, name: str) -> None:
        """counter: counts every failure. threads: of one `gather` at most; name: what theirs begin
        with.
        """
        self.counter = counter
        self.skips_until = 0.0  # time.monotonic: a server that hangs costs its timeout once
        self._threads, self._name = threads, name
        self._closed = False

    def call(self, work: Callable[[], T], until: float) -> T:
        """The result of one call: see `gather`. Raises Failure."""
        (result,) = self.gather([work], until)
        if isinstance(result, Failure):
            raise result
        return result

    def gather(
        self, works: Sequence[Callable[[], T]], until: float, threads: int | None = None
    ) -> "list[T | Failure]":
        """The result of each call, made in parallel, or why it failed; no later than `until`
        (time.monotonic), whatever the other side does. threads: in place of the usual number.
        """
        if time.monotonic() >= self.skips_until:
            results = self._gathered(works, until, threads or self._threads)
        else:
            skipped = "it did not answer, and is asked again in a few seconds"
            results = [Failure("closed", skipped) for _ in works]
        reasons = [result.reason for result in results if isinstance(result, Failure)]
        for reason in reasons:
            self.counter.failed(reason)
        silent = {"late", "unreachable"}.intersection(reasons) and _ANSWERED.isdisjoint(reasons)
        if silent and len(reasons) == len(works):
            self.skips_until = time.monotonic() + _SKIPPED
        return results

    def _gathered(
        self, works: Sequence[Callable[[], T]], until: float, threads: int
    ) -> "list[T | Failure]":
        trying = partial(self._tried, until=until)
        try:
            futures = begin(trying, works, most=threads, name=self._name)
        except RuntimeError:  # the system gives no threads, or the interpreter ends
            return [Failure("closed", "there are no threads to ask with") for _ in works]
        try:
            wait_for(futures, until)
            return [
                future.result() if future.done() else Failure("late", "no answer in time")
                for future in futures
            ]
        finally:
            for future in futures:
                future.cancel()

    def _tried(self, work: Callable[[], T], until: float) -> T | Failure:
        """The result of a call, or why it failed; it may have waited for a thread."""
        if self._closed:
            return Failure("closed", "the memory was closed")
        if time.monotonic() >= until:
            return Failure("late", "no answer in time")
        try:
            return work()
        except Failure as failure:
            return failure

    def close(self) -> None:
        """Begin nothing any more; idempotent."""
        self._closed = True


# Daemon threads


def begin(
    work: Callable[[Item], T], items: Sequence[Item], *, most: int = _AT_ONCE, name: str
) -> "list[Future[T]]":
    """Call work(item) for each item, in parallel on daemon threads, which end when all is done.

    most: threads. An item whose future is cancelled before its turn is skipped. Raises RuntimeError
    where the system gives no thread.
    """
    futures: list[Future[T]] = [Future() for _ in items]
    waiting = deque(zip(futures, items))

    def take_turns() -> None:
        while True:
            try:
                future, item = waiting.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(item))
                except BaseException as error:
                    future.set_exception(error)

    for number in range(min(most, len(items))):
        try:
            threading.Thread(target=take_turns, name=f"{name}-{number}", daemon=True).start()
        except RuntimeError:
            if not number:  # else the threads that started do all of it
                raise
            break
    return futures


def at_once(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """The results of work(item) for each item, in order, made in parallel. Raises the first error
    without waiting for the rest.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    futures = begin(work, items, name="memstore-share")
    try:
        wait_for(futures)
        for future in futures:
            if future.done():
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def wait_for(futures: "Sequence[Future[T]]", until: float = math.inf) -> None:
    """Wait until all are done, one of them raised, or it is `until` (time.monotonic).

    In short waits: an interrupt that comes just as a wait begins does not end that one.
    """
    while True:
        left = until - time.monotonic()
        done, waiting = wait(futures, max(0.0, min(left, _PIECE)), FIRST_EXCEPTION)
        if not waiting or left <= _PIECE or any(future.exception() for future in done):
            return
