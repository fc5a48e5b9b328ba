"""The command line: `memstore`, and `python -m memstore`."""

import signal
import sys

_received: list[KeyboardInterrupt] = []


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


if __name__ == "__main__":
    main()
