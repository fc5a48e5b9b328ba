"""Running a script that trains: an interrupt, and a user's mistake, are one line."""

from collections.abc import Callable

from memstore.errors import MemstoreError


def start(main: Callable[[], None]) -> None:
    """Run it. Raises SystemExit."""
    try:
        main()
    except MemstoreError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
