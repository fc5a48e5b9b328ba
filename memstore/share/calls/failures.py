"""Why a read of another machine came to nothing, by name."""

from typing import Literal

Reason = Literal[
    "late",  # no answer before the deadline
    "unreachable",  # no connection, or it broke
    "refused",  # the server answered with an error (5xx, not now)
    "denied",  # no credentials, or not these
    "missing",  # it has not what a manifest names
    "short",  # fewer bytes than were asked for
    "damaged",  # bytes that are not what was written
    "other",  # what another write, block or model is: a record under a wrong key
    "closed",  # not asked: it did not answer lately, or is closed
    "full",  # no room to write
]
PASSING = frozenset({"late", "unreachable", "refused", "missing", "short", "damaged", "other"})
"""Reasons that may be gone when it is tried again."""

ANSWERED = frozenset({"missing", "short", "damaged", "other", "denied"})
"""Reasons of a server that does answer."""


class Failure(Exception):
    """A read or write of a tier that failed; inside this room only."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(what)
        self.reason: Reason = reason
