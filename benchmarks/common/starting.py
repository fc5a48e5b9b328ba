"""Running a script that trains: a signal ends it in order, a user's mistake is one line."""

from collections.abc import Callable
from typing import NoReturn

from memstore.cli.terminal.signals import end_in_order
from memstore.errors import MemstoreError


def start(main: Callable[[], None]) -> NoReturn:
    """Run it, and exit."""

    def checked() -> None:
        try:
            main()
        except MemstoreError as error:
            raise SystemExit(str(error)) from None

    end_in_order(checked)
