"""The writes that a document was made by."""

from collections.abc import Sequence
from typing import NamedTuple

from memstore.disk.record import WriteId


class Write(NamedTuple):
    """One of the writes that a document was made by: its first, or an append."""

    first: int  # block
    id: WriteId


def write_of(writes: Sequence[Write], block: int) -> WriteId | None:
    """The id of the write that made a block's records; None for records of format 1."""
    for first, write in reversed(writes):
        if first <= block:
            return write
    return None
