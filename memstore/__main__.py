"""The command line: `memstore`, and `python -m memstore`."""

from memstore.cli.terminal.signals import end_in_order


def main() -> None:
    """Entry point of `memstore`."""
    end_in_order(_command_line)


def _command_line() -> None:
    from memstore.cli.main import main

    main()


if __name__ == "__main__":
    main()
