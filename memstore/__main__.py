"""The command line: `memstore`, and `python -m memstore`."""

import atexit
import gc
import os
import signal
import sys
import threading

_received: list[KeyboardInterrupt] = []


def run() -> None:
    """Entry point of `memstore`: run the command in a process of its own, and end that process."""
    # Imports of torch and transformers make a million objects that live until the process ends:
    # looking for garbage among them so often would take 0.7 s of a start.
    gc.set_threshold(50_000)
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            _leave(end.code)
        raise


def main() -> None:
    """Run the command. Ctrl-C and SIGTERM end it as an exception does: what is committed stays,
    partial files are removed, and the exit status is 130 or 143. Raises SystemExit.
    """
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored
            signal.signal(signal.SIGINT, _interrupt)
        from memstore.cli.main import main

        main()
    except KeyboardInterrupt as interrupt:  # while modules were imported, or a second one
        _end(interrupt)
    except Exception:
        if not _received:
            raise
        _end(_received[-1])  # a library in C replaced it by an error of its own


def _interrupt(number: int, _: object) -> None:
    _received.append(KeyboardInterrupt(number))
    raise _received[-1]


def _end(interrupt: KeyboardInterrupt) -> None:
    from memstore.cli.command import exit_status

    print("interrupted", file=sys.stderr)
    sys.exit(exit_status(interrupt))


def _leave(status: int) -> None:
    """End this process without freeing its objects one by one, which takes 0.8 s; return if a
    thread is still to be waited for, or if the process is profiled.
    """
    waiting = [one for one in threading.enumerate() if not one.daemon]
    if len(waiting) == 1 and sys.getprofile() is None and sys.gettrace() is None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    run()
