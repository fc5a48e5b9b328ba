"""Calls to another machine: in parallel, retried with growing pauses, never later than a deadline,
and not made at all for some seconds after the machine did not answer.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from memstore.share.daemon_threads import begin, wait_for
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

Reason = Literal[
    "late",  # no answer before the deadline
    "unreachable",  # no connection, or it broke
    "refused",  # the server answered with an error (5xx, not now)
    "denied",  # no credentials, or not these
    "missing",  # it lacks an object that a manifest names
    "short",  # fewer bytes than were asked for
    "damaged",  # bytes that are not what was written
    "other",  # what another write, block or model is: a record under a wrong key
    "closed",  # not asked: it did not answer lately, or is closed
    "full",  # no room to write
]
_PASSING = frozenset({"late", "unreachable", "refused", "missing", "short", "damaged", "other"})
# Reasons of a server that does answer.
_ANSWERED = frozenset({"missing", "short", "damaged", "other", "denied"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds before a retry, doubled from one to the next
# A wrong answer is asked for once more: a store may report late what it holds.
_TRIES_OF_ANSWERED = 2
_SKIPPED = 5.0  # seconds that a server is skipped after it did not answer


class Failure(Exception):
    """A read or write of a tier that failed; inside this room only."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(what)
        self.reason: Reason = reason


class CircuitBreaker:
    """Skips a server for some seconds after it did not answer, so that not every read costs its
    timeout. May be used by several threads.
    """

    def __init__(self) -> None:
        self.until = 0.0  # time.monotonic

    @property
    def allows(self) -> bool:
        """May the server be called?"""
        return time.monotonic() >= self.until

    def failed(self, reason: str) -> None:
        """Note that a call failed."""
        if reason in ("late", "unreachable"):
            self.until = time.monotonic() + _SKIPPED


class Calls:
    """Calls to one tier. May be used by several threads."""

    def __init__(
        self, counter: TierCounter, *, threads: int = 16, name: str = "share", retry: bool = True
    ) -> None:
        """counter: counts every failure. threads: of one `gather` at most; name: what theirs begin
        with. retry: try again what failed in passing.
        """
        self.counter, self.breaker = counter, CircuitBreaker()
        self._threads, self._name, self._retry = threads, name, retry
        self._closed = False

    def call(self, work: Callable[[float], T], until: float) -> T:
        """The result of one call: see `gather`. Raises Failure."""
        (result,) = self.gather([work], until)
        if isinstance(result, Failure):
            raise result
        return result

    def gather(
        self, works: Sequence[Callable[[float], T]], until: float, threads: int | None = None
    ) -> "list[T | Failure]":
        """The result of each call, made in parallel, or why it finally failed; no later than
        `until` (time.monotonic), whatever the other side does.

        works: each takes the seconds that are left, may be called more than once, and raises
        Failure. threads: in place of the usual number.
        """
        if self.breaker.allows:
            results = self._gathered(works, until, threads or self._threads)
        else:
            skipped = "it did not answer, and is asked again in a few seconds"
            results = [Failure("closed", skipped) for _ in works]
        failures = [self._counted(one) for one in results if isinstance(one, Failure)]
        reasons = {failure.reason for failure in failures}
        if len(failures) == len(works) and not reasons & _ANSWERED:
            for reason in reasons:
                self.breaker.failed(reason)
        return results

    def _gathered(
        self, works: Sequence[Callable[[float], T]], until: float, threads: int
    ) -> "list[T | Failure]":
        trying = partial(self._tried, until=until)
        try:
            futures = begin(trying, works, most=threads, name=self._name)
        except RuntimeError:  # the system gives no threads, or the interpreter ends
            return [Failure("closed", "there are no threads to ask with") for _ in works]
        try:
            wait_for(futures, until)
            return [
                future.result() if future.done() else Failure("late", "no answer in time")
                for future in futures
            ]
        finally:
            for future in futures:
                future.cancel()

    def _tried(self, work: Callable[[float], T], until: float) -> T | Failure:
        """The result of a call, or why it finally failed. `gather` counts that failure: it may have
        given the call up.
        """
        tries = 0
        while True:
            left = until - time.monotonic()
            if self._closed:
                return Failure("closed", "the memory was closed")
            if left <= 0:
                return Failure("late", "no answer in time")
            try:
                return work(left)
            except Failure as failure:
                tries += 1
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1))
                pause *= random.uniform(0.5, 1.5)
                if (
                    not self._retry
                    or failure.reason not in _PASSING
                    or (failure.reason in _ANSWERED and tries >= _TRIES_OF_ANSWERED)
                    or time.monotonic() + pause >= until
                ):
                    return failure
                self._counted(failure)
            time.sleep(pause)

    def _counted(self, failure: Failure) -> Failure:
        self.counter.failed(failure.reason)
        return failure

    def close(self) -> None:
        """Begin and retry nothing any more; idempotent."""
        self._closed = True
