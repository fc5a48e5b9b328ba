"""Interrupts that wait for a place where the work can be left."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handle = Callable[[int, FrameType | None], object]


@contextmanager
def put_off() -> Iterator[Callable[[], None]]:
    """Signals whose handlers raise KeyboardInterrupt have it raised by the next call of what is
    yielded, or when the block ends.

    The handlers are called at once: one that ends the process when it is asked again still does,
    and what a second one raises does not wait. Signals reach the main thread alone, so nothing is
    to be put off in another.
    """
    asked = False

    def putting_off(handle: Handle) -> Handle:
        def handle_and_wait(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            try:
                handle(number, frame)
            except KeyboardInterrupt:
                if asked:
                    raise
                asked = True

        return handle_and_wait

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    handlers: dict[signal.Signals, Handle] = {}
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            handle = signal.getsignal(number)
            if callable(handle):
                handlers[number] = handle
    try:
        for number, handle in handlers.items():
            signal.signal(number, putting_off(handle))
        yield check
    finally:
        for number, handle in handlers.items():
            signal.signal(number, handle)
    check()
