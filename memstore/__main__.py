"""The command line: `memstore`, and `python -m memstore`."""

from memstore.cli.terminal.signals import end_in_order
from memstore.cli.terminal.waiting import sleep_where_busy


def main() -> None:
    """Entry point of `memstore`."""
    sleep_where_busy()
    end_in_order(_command_line)


def _command_line() -> None:
    from memstore.cli.main import main

    main()


if __name__ == "__main__":
    main()
