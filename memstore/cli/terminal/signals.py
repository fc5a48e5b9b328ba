"""What SIGINT, SIGTERM and SIGHUP do to a command: it ends in order, as by an exception, and its
exit status is 128 and the signal's number. Imports next to nothing: they may come while the rest is
being imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_WISH = 1.0  # seconds in which more of them ask for nothing new
# seconds until an interrupt is tried again that came where it is lost, or does harm
_LATER = 0.01
_IMPORT = "<frozen importlib._bootstrap>"


class _Asked:
    """The signal that asked this process to end."""

    number: int | None = None
    at: float | None = None  # when it was first asked
    ended = False  # the command has, and only Python is left to end


def end_in_order(command: Callable[[], None]) -> NoReturn:
    """Run a command; exit as it does, or with 128 + n where signal n ended it.

    Who asks again a second later, or when the command is done, is obeyed at once. While a module is
    imported the end waits: code in C++ that is imported aborts at an exception. Signals that the
    process was started to ignore stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _ask)
    sys.unraisablehook = _unraisable
    status: str | int | None = 0
    try:
        try:
            command()
        finally:
            _Asked.ended = True
            signal.setitimer(signal.ITIMER_REAL, 0)  # of an end that has come by itself
    except SystemExit as end:
        status = end.code
    except (KeyboardInterrupt, Exception):  # which code in C makes of an interrupt now and then
        if _Asked.number is None:
            raise
        status = 128 + signal.SIGINT
    if status == 128 + signal.SIGINT and _Asked.number is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it
                stream.flush()
        os._exit(128 + _Asked.number)  # Python's own end would die of the next signal
    sys.exit(status)


def _ask(number: int, frame: FrameType | None = None) -> None:
    now = time.monotonic()
    if _Asked.at is None and not _Asked.ended:
        _Asked.at = now
        _end(number, frame)
    elif _Asked.at is None or now - _Asked.at > _ONE_WISH:
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # a bar of progress hides the cursor
        os._exit(128 + number)


def _end(number: int, frame: FrameType | None) -> None:
    """Interrupt what is done there, now or when nothing is imported any more."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            _end_later(number)
            return
        frame = frame.f_back
    if not _Asked.ended:
        _Asked.number = number
        raise KeyboardInterrupt


def _end_later(number: int) -> None:
    signal.signal(signal.SIGALRM, lambda _, frame: _end(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _LATER)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt in a destructor ends nothing: ask again."""
    if issubclass(lost.exc_type, KeyboardInterrupt) and _Asked.number is not None:
        _end_later(_Asked.number)
    else:
        sys.__unraisablehook__(lost)
