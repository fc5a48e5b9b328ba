"""What a memory says of itself, and what it may be bounded by."""

from typing import Any

import msgspec

from memstore.decode import Amount, Count, Positive, typed
from memstore.errors import InvalidInput

FORMAT = 7


class Description(msgspec.Struct):
    """What a memory says of itself."""

    format: Positive
    signature: dict[str, Any]
    codec: str
    created: Amount
    quota: Count | None
    selector: bool  # has it one, which then says of itself what it is


def check_bound(what: str, size: int | None) -> None:
    """What is no number of bytes would be committed, and not be read any more. Raises InvalidInput;
    what: it bounds.
    """
    try:
        typed(0 if size is None else size, Count)
    except ValueError:
        raise InvalidInput(
            f"a {what} is a whole number of bytes below 2**62, or None for no bound; it is not "
            f"{size!r}"
        ) from None


def check_budget(budget: int | None, selector: object) -> None:
    """Raises InvalidInput for no bound, and for one of a memory that has no passages."""
    check_bound("kv budget", budget)
    if budget is not None and selector is None:
        raise InvalidInput(
            "a kv budget is of passages, which a selector chooses, and this memory has none; leave "
            "it out, or set a quota"
        )
