"""The command line: `memstore`, and `python -m memstore`."""

import signal
import sys


def main() -> None:
    """Entry point of `memstore`. Ctrl-C and SIGTERM end a command as an exception does: what is
    committed stays, partial files are removed, and the exit status is 130 or 143.
    """
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        from memstore.cli.main import main

        main()
    except KeyboardInterrupt as interrupt:  # while modules were imported, or a second one
        from memstore.cli.command import exit_status

        print("interrupted", file=sys.stderr)
        sys.exit(exit_status(interrupt))


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    main()
