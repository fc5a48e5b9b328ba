"""A store or a server that did not answer is left alone for a while, so that it does not cost every
read its timeout.
"""

import time

from memstore.share.calls.failures import Reason

_SECONDS = 5.0
_NO_ANSWER: frozenset[Reason] = frozenset({"late", "unreachable"})


class Rest:
    """Whether it is asked. Safe for several threads."""

    def __init__(self) -> None:
        self.until = 0.0  # time.monotonic

    @property
    def over(self) -> bool:
        """May it be asked?"""
        return time.monotonic() >= self.until

    def told(self, reason: Reason) -> None:
        """A call has failed."""
        if reason in _NO_ANSWER:
            self.until = time.monotonic() + _SECONDS
