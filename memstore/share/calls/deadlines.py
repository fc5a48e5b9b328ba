"""Calls to another machine: side by side, tried again with growing pauses, never later than a
deadline, and not at all for a while where it did not answer.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from memstore.share.calls.failures import ANSWERED, PASSING, Failure
from memstore.share.calls.rest import Rest
from memstore.share.objects.daemon_threads import begin, wait_for
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds before a try, doubled from one to the next
# What is answered and is not what was asked for is asked for once more: a store may tell late of
# what it has.
_TRIES_OF_ANSWERED = 2


class Calls:
    """Calls to one tier. Safe for several threads."""

    def __init__(
        self, counter: TierCounter, *, threads: int = 16, name: str = "share", retry: bool = True
    ) -> None:
        """counter: counts every failure. threads: of one `gather` at most; name: what theirs begin
        with. retry: try again what failed in passing.
        """
        self.counter, self.rest = counter, Rest()
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
        """The result of each of some calls, made at the same time, or why it failed at last; no
        later than `until` (time.monotonic), whatever the other side does. threads: in the place of
        the usual number.

        A work is told the seconds that are left; it may be called more than once, and raises
        Failure. After calls none of which was answered no other is made for some seconds.
        """
        if self.rest.over:
            results = self._gathered(works, until, threads or self._threads)
        else:
            at_rest = "it did not answer, and is asked again in a few seconds"
            results = [Failure("closed", at_rest) for _ in works]
        failures = [self._counted(one) for one in results if isinstance(one, Failure)]
        reasons = {failure.reason for failure in failures}
        if len(failures) == len(works) and not reasons & ANSWERED:
            for reason in reasons:
                self.rest.told(reason)
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
        """The result of a call, or why it failed at last, which is for `gather` to count: it may
        have given the call up.
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
                    or failure.reason not in PASSING
                    or (failure.reason in ANSWERED and tries >= _TRIES_OF_ANSWERED)
                    or time.monotonic() + pause >= until
                ):
                    return failure
                self._counted(failure)
            time.sleep(pause)

    def _counted(self, failure: Failure) -> Failure:
        self.counter.failed(failure.reason)
        return failure

    def close(self) -> None:
        """Begin and try nothing any more; more than once is the same as once."""
        self._closed = True
