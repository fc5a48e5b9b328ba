"""Parallel work on daemon threads, so that a request that hangs delays neither Ctrl-C nor the end
of the process; concurrent.futures would join its threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

_AT_ONCE = 16  # threads
_PIECE = 0.5  # seconds of one wait


def begin(
    work: Callable[[Item], T], items: Sequence[Item], most: int = _AT_ONCE
) -> "list[Future[T]]":
    """Call work(item) for each item on up to `most` threads, which end when all is done. An item
    whose future is cancelled before its turn is skipped.
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

    for _ in range(min(most, len(items))):
        threading.Thread(target=take_turns, name="memstore-share", daemon=True).start()
    return futures


def at_once(work: Callable[[Item], T], items: Sequence[Item], most: int = _AT_ONCE) -> list[T]:
    """The results of work(item) for each item, in order, made in parallel. Raises the first error
    without waiting for the rest.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    return results(begin(work, items, most))


def interruptible(work: Callable[[], T]) -> T:
    """The result of work(). Ctrl-C, which only the main thread gets, does not wait for it."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    (result,) = results(begin(lambda _: work(), [None]))
    return result


def results(futures: "Sequence[Future[T]]") -> list[T]:
    """The results of all, in order. Raises the first error without waiting for the rest."""
    try:
        waiting = {*futures}
        while waiting:
            # short waits: an interrupt just before a wait does not end that wait
            done, waiting = wait(waiting, _PIECE, FIRST_EXCEPTION)
            for future in done:
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
