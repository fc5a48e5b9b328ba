"""Parallel work on daemon threads: a request that hangs delays neither Ctrl-C nor the end of the
process, while concurrent.futures would join its threads.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

AT_ONCE = 16  # requests

_PIECE = 0.5  # seconds


def begin(
    work: Callable[[Item], T],
    items: Sequence[Item],
    *,
    most: int = AT_ONCE,
    name: str = "memstore-share",
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
    futures = begin(work, items)
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
