"""The row in which a memory describes itself."""

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


def check_quota(size: int | None) -> None:
    """Raises InvalidInput for what is no number of bytes: it would be committed, and refused by
    whoever opens the memory.
    """
    try:
        typed(0 if size is None else size, Count)
    except ValueError:
        raise InvalidInput(
            f"a quota is a whole number of bytes below 2**62, or None for no bound; it is not "
            f"{size!r}"
        ) from None
