"""Processes forked from the test process, for tests that start many: everything is imported
already.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

_PROGRAM = "true"  # what the process would become, if it did not stay a fork of this one


def forked(
    program: Callable[[], object],
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """As Popen starts a Python program, but for what it begins with: imported modules.

    program: what it does; arguments: its sys.argv; env, options: those of Popen.
    """
    variables = dict(os.environ if env is None else env)

    def stay() -> None:
        # after Popen has settled streams and directory; never returns, so that nothing is executed
        status = 1
        try:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits for one of them
            _begin_anew(variables, arguments)
            program()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            with suppress(OSError):
                sys.excepthook(type(error), error, error.__traceback__)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)

    return subprocess.Popen([_PROGRAM], preexec_fn=stay, **options)


def _begin_anew(variables: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Of what a test has changed in its process, and that a new one has as Python begins."""
    torch.set_num_threads(1)  # the others of this process's are not the fork's
    gc.freeze()  # a collector would touch, and so copy, all that was imported
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [*arguments]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(file, mode, buffering=1, encoding="utf-8", closefd=False)
        for file, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.excepthook = lambda *error: traceback.print_exception(*error)
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
