"""The command line: `memstore`, and `python -m memstore`."""

import signal
import sys

_received: list[int] = []  # numbers of signals


def main() -> None:
    """Entry point of `memstore`. Ctrl-C and SIGTERM end a command as an exception does: what is
    committed stays, partial files are removed, and the exit status is 130 or 143.
    """
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored
            signal.signal(signal.SIGINT, _interrupt)
        from memstore.cli.main import main

        main()
    except KeyboardInterrupt:  # while modules were imported, or a second one
        _end()
    except Exception:
        if not _received:
            raise
        _end()  # a library in C replaced the interrupt by an error of its own


def _interrupt(number: int, _: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt(number)


def _end() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(128 + (_received[-1] if _received else signal.SIGINT))


if __name__ == "__main__":
    main()
