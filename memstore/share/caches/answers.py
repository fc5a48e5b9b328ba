"""Records of a batch as a tier had them: checked, and copied into the slots that they are wanted
in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memstore.disk.read.batch import Batch, Wanted
from memstore.errors import CorruptBlock
from memstore.share.calls.failures import Failure, Reason

Found = tuple[Wanted, Sequence[memoryview]]
"""A record of a batch, and its bytes as a tier had them, in pieces."""

Filled = tuple[list[Found], list[tuple[Wanted, Failure]]]
"""What was checked and is in its slots, and what is not what was asked for."""


class Answers(NamedTuple):
    """What a cache has of a batch."""

    good: list[Found]  # checked, and in their slots
    bad: list[tuple[Wanted, Failure]]  # what is not what was asked for
    missing: list[Wanted]
    unread: list[Wanted]  # for reasons that are counted


def fill(batch: Batch, found: Sequence[Found]) -> Filled:
    """Check records and copy the wanted heads of them into their slots; those that are what was
    asked for, and those that are not.
    """
    good, bad = [], []
    for record, parts in found:
        try:
            batch.fill(record, parts[0])
            good.append((record, parts))
        except CorruptBlock as error:
            bad.append((record, as_failure(error)))
    return good, bad


def as_failure(error: CorruptBlock) -> Failure:
    """Why a record is not what was asked for."""
    text = str(error)
    foreign = "it is the record of" in text or "another model" in text
    reason: Reason = "other" if foreign else "damaged"
    return Failure(reason, text)
