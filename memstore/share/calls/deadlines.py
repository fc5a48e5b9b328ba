"""Calls to another machine: never later than a deadline, tried again within a budget, asked twice
where one answer takes unusually long, and not made at all while everything fails.
"""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from memstore.share.calls.failures import PASSING, Failure
from memstore.share.objects.daemon_threads import Threads
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds before a try, doubled from one to the next
_MOST_RETRIES, _EARNED = 20.0, 0.2  # tries again at once; and what each success adds to them
# A tier is not asked any more when so many calls in a row failed, over so many seconds; and for how
# long, doubled while it goes on.
_IN_A_ROW, _OVER, _CLOSED, _LONGEST_CLOSED = 5, 2.0, 1.0, 30.0
_SEEN, _ENOUGH = 256, 20  # calls by which an unusually long one is told, and how many at least
_LOOK = 0.5  # seconds until it is seen that a call was given up by close, which wakes nobody
# An unusual one takes longer than this share of them, by this factor; and these seconds at least.
_UNUSUAL, _BEYOND, _LEAST_HEDGE = 0.95, 1.25, 0.02


class Breaker:
    """Whether a tier is asked: not for a while after it only failed, then by one call first."""

    def __init__(self, in_a_row: int = _IN_A_ROW, over: float = _OVER) -> None:
        """in_a_row: calls that have failed one after the other, over: so many seconds."""
        self._in_a_row, self._over = in_a_row, over
        self._lock = threading.Lock()
        self._failed, self._since, self._until, self._pause = 0, 0.0, 0.0, _CLOSED
        self._trying = False

    def allows(self) -> bool:
        """May it be asked now? Whoever is allowed to has to tell what became of it."""
        with self._lock:
            if not self._until:
                return True
            if self._trying or time.monotonic() < self._until:
                return False
            self._trying = True
            return True

    def told(self, *, good: bool) -> None:
        """What became of a call."""
        now = time.monotonic()
        with self._lock:
            self._trying = False
            if good:
                self._failed, self._until, self._pause = 0, 0.0, _CLOSED
                return
            self._since = self._since if self._failed else now
            self._failed += 1
            if self._until:  # the one call first has failed
                self._pause = min(2 * self._pause, _LONGEST_CLOSED)
            elif self._failed < self._in_a_row or now - self._since < self._over:
                return
            self._until = now + self._pause


class Retries:
    """How many calls may be tried again: a share of those that succeed, so that trying again never
    becomes most of what a failing server is asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = _MOST_RETRIES

    def take(self) -> bool:
        """May one be tried again?"""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def earn(self) -> None:
        """A call has succeeded."""
        with self._lock:
            self._left = min(_MOST_RETRIES, self._left + _EARNED)


class Latencies:
    """How long calls took lately, and what is unusual."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: deque[float] = deque(maxlen=_SEEN)

    def add(self, seconds: float) -> None:
        """A call took so long."""
        with self._lock:
            self._seen.append(seconds)

    def unusual(self) -> float | None:
        """Seconds that few calls take; None while too few were seen."""
        with self._lock:
            if len(self._seen) < _ENOUGH:
                return None
            ordered = sorted(self._seen)
        return max(_LEAST_HEDGE, _BEYOND * ordered[int(_UNUSUAL * len(ordered))])


@dataclass
class _Call(Generic[T]):
    """One of the calls of `gather`."""

    work: Callable[[float], T]
    tries: int = 0
    again: float = 0.0  # when it is tried next
    running: dict["Future[T]", float] = field(default_factory=dict)  # and when each began
    last: Failure | None = None  # why the last try failed
    result: T | Failure | None = None
    done: bool = False


class Calls:
    """Calls to one tier, many at once. Safe for several threads; starts anew in a forked child."""

    def __init__(
        self,
        counter: TierCounter,
        *,
        threads: int = 16,
        hedge: bool = True,
        tries: int = 1 << 30,
        breaker: Callable[[], Breaker] = Breaker,
        name: str = "share",
    ) -> None:
        """counter: told of every failure. threads: calls under way at once. hedge: ask again where
        an answer takes unusually long, and take the first. tries: of a call at most.
        """
        self._tries, self._new_breaker = tries, breaker
        self.counter, self.hedged = counter, 0  # how many were asked twice
        self._threads, self._hedge, self._name = threads, hedge, name
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self.breaker, self._retries = self._new_breaker(), Retries()
        self._latencies = Latencies()
        self._pool: Threads | None = None

    def begin(self, work: Callable[[float], T], left: float) -> "Future[T]":
        """Do this on a thread of its own; left: seconds, which it is told. Raises Failure."""
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            if self._pool is None and not self._closed:
                self._pool = Threads(self._threads, self._name)
            if self._pool is None:
                raise Failure("closed", "the memory was closed")
            return self._pool.submit(work, left)

    def call(self, work: Callable[[float], T], until: float) -> T:
        """The result of one call: see `gather`. Raises Failure."""
        (result,) = self.gather([work], until)
        if isinstance(result, Failure):
            raise result
        return result

    def gather(self, works: Sequence[Callable[[float], T]], until: float) -> "list[T | Failure]":
        """The result of each of some calls, made at the same time, or why it failed at last; no
        later than `until` (time.monotonic), whatever the other side does.

        A work is told the seconds that are left; it may be called more than once, and raises
        Failure.
        """
        calls = [_Call(work) for work in works]
        try:
            self._answer(calls, until)
        except BaseException:
            self.breaker.told(good=False)  # or it waits for ever for what became of these
            raise
        return [call.result for call in calls]  # type: ignore[misc]

    def _answer(self, calls: "Sequence[_Call[T]]", until: float) -> None:
        while not all(call.done for call in calls):
            now = time.monotonic()
            for call in calls:
                if not call.done:
                    self._go_on(call, now, until)
            running = [future for call in calls if not call.done for future in call.running]
            if all(call.done for call in calls):
                break
            pause = max(0.0, self._next(calls, until) - time.monotonic())
            if running:
                wait(running, min(pause, _LOOK), FIRST_COMPLETED)
            else:
                time.sleep(pause)
            for call in calls:
                self._collect(call, until)

    def _go_on(self, call: "_Call[T]", now: float, until: float) -> None:
        """Begin a try, or a second one beside it, where it is time; give up after the deadline."""
        if now >= until:
            if call.running or call.last is None:
                self.breaker.told(good=False)
                self._end(call, Failure("late", "no answer in time"))
            else:  # counted already
                call.result, call.done = call.last, True
        elif not call.running and now >= call.again:
            if not self.breaker.allows():
                self._end(call, Failure("closed", "it has not answered for a while"))
                return
            self._try(call, now, until)
        elif len(call.running) == 1 and self._hedge:
            unusual = self._latencies.unusual()
            began = next(iter(call.running.values()))
            if unusual is not None and now - began >= unusual and self._retries.take():
                self.hedged += 1
                self._try(call, now, until)

    def _try(self, call: "_Call[T]", now: float, until: float) -> None:
        try:
            call.running[self.begin(call.work, until - now)] = now
            call.tries += 1
        except Failure as failure:
            self.breaker.told(good=False)
            self._end(call, failure)
        except RuntimeError:  # the system gives no more threads, or the interpreter ends
            self.breaker.told(good=False)
            self._end(call, Failure("closed", "there are no threads to ask with"))

    def _next(self, calls: "Sequence[_Call[T]]", until: float) -> float:
        """When something is to be done although no call has ended."""
        unusual = self._latencies.unusual() if self._hedge else None
        times = [until]
        for call in calls:
            if call.done:
                continue
            if not call.running:
                times.append(call.again)
            elif unusual is not None and len(call.running) == 1:
                began = next(iter(call.running.values()))
                times.append(max(began + unusual, time.monotonic() + _LEAST_HEDGE))
        return min(times)

    def _collect(self, call: "_Call[T]", until: float) -> None:
        for future in [future for future in call.running if future.done()]:
            began = call.running.pop(future)
            if call.done:
                continue
            if future.cancelled():  # by close, before its turn came
                self._end(call, Failure("closed", "the memory was closed"))
                continue
            error = future.exception()
            if error is None:
                self.breaker.told(good=True)
                self._retries.earn()
                self._latencies.add(time.monotonic() - began)
                call.result, call.done = future.result(), True
                continue
            if not isinstance(error, Failure):
                raise error
            answered = error.reason in ("missing", "short", "damaged", "other", "denied")
            self.breaker.told(good=answered)
            self.counter.failed(error.reason)
            call.last = error
            if call.running:  # the other one may still succeed
                continue
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (call.tries - 1))
            pause *= random.uniform(0.5, 1.5)
            now = time.monotonic()
            # what is missing is asked for once more, in case a store tells late of what it has
            most = 2 if answered else self._tries
            if (
                error.reason not in PASSING
                or call.tries >= min(most, self._tries)
                or now + pause >= until
                or not self._retries.take()
            ):
                call.result, call.done = error, True
            else:
                call.again = now + pause

    def _end(self, call: "_Call[T]", failure: Failure) -> None:
        self.counter.failed(failure.reason)
        for future in call.running:
            future.cancel()
        call.result, call.done = failure, True

    def close(self) -> None:
        """End its threads, without waiting for calls that nobody waits for; more than once is the
        same as once.
        """
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.end()
