"""Reading parts of objects: neighbouring ones in one request, all requests in parallel, each
checked by the caller's function, retried, and given up at the deadline.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.errors import MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.share.calls import Calls, Failure, Reason
from memstore.share.object_store import GAP, Extent, ObjectStore, Span, coalesce
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_MOST = 4 << 20  # bytes of one request: two smaller ones in parallel are faster than a larger one
# Requests of one read in parallel, and where they have _SMALL bytes in the mean: those only wait.
_AT_ONCE, _SMALL_AT_ONCE, _SMALL = 32, 128, 64 << 10
# Bytes of one read within the deadline; more of them have longer, up to so many times.
_IN_TIME, _LONGEST = 32 << 20, 100.0
_TRIES = 3  # of extents with wrong bytes


class Remote:
    """The object store as a tier. May be used by several threads."""

    def __init__(self, objects: ObjectStore, *, deadline: float, gap: int = GAP) -> None:
        """deadline: seconds of one read of up to 32 MB; gap: see coalesce."""
        self.objects, self.deadline = objects, deadline
        self.counter = TierCounter()
        self.calls = Calls(self.counter, threads=_AT_ONCE, name="memstore-remote")
        self._gap = gap
        self.requests = self.bytes = 0  # that were asked for, with retries

    def until(self, size: int = 0) -> float:
        """The deadline of a read of so many bytes that begins now (time.monotonic)."""
        return time.monotonic() + self.deadline * min(max(1.0, size / _IN_TIME), _LONGEST)

    def read(
        self, extents: Sequence[Extent], check: Callable[[int, memoryview], None], until: float
    ) -> list[memoryview | Failure]:
        """The bytes of some extents, or why they could not be read. check: takes the number of an
        extent and bytes, and raises Failure where they are not its bytes; those are read again.
        """
        found: list[memoryview | Failure | None] = [None] * len(extents)
        left = list(range(len(extents)))
        for tried in range(_TRIES):
            spans = coalesce([extents[number] for number in left], self._gap, _MOST)
            small = sum(span.length for span in spans) <= _SMALL * len(spans)
            threads = _SMALL_AT_ONCE if small else _AT_ONCE
            answers = self.calls.gather([self._reading(span) for span in spans], until, threads)
            again = []
            for span, answer in zip(spans, answers):
                for number in (left[at] for at in span.extents):
                    if isinstance(answer, Failure):
                        found[number] = answer
                        continue
                    _, offset, length = extents[number]
                    start = offset - span.offset
                    part = answer[start : start + length]
                    try:
                        check(number, part)
                        found[number] = part
                    except Failure as failure:
                        self.counter.failed(failure.reason)
                        found[number] = failure
                        again.append(number)
            left = again
            if not left or tried == _TRIES - 1:
                break
        assert None not in found
        return found  # type: ignore[return-value]

    def _reading(self, span: Span) -> Callable[[float], memoryview]:
        def read(left: float) -> memoryview:
            self.requests += 1
            self.bytes += span.length
            try:
                (part,) = self.objects.get_ranges(span.name, [(span.offset, span.length)])
            except StoreUnavailable as error:
                raise as_failure(error) from error
            if len(part) != span.length:
                raise Failure("short", f"{self.objects.url}: {span.name} was cut short")
            return part

        return read

    def call(self, work: Callable[[], T]) -> T:
        """The result of another call of the store, within the deadline. Raises what the call
        raises, and StoreUnavailable.
        """

        def asking(left: float) -> T | MemstoreError:
            self.requests += 1
            try:
                return work()
            except StoreUnavailable as error:
                raise as_failure(error) from error
            except MemstoreError as error:
                return error

        try:
            result = self.calls.call(asking, self.until())
        except Failure as failure:
            raise self.error(failure) from failure
        if isinstance(result, MemstoreError):
            raise result
        return result

    def error(self, failure: Failure) -> StoreUnavailable:
        """The error for a failed read, with the reason."""
        kind = ObjectNotFound if failure.reason == "missing" else StoreUnavailable
        if isinstance(failure.__cause__, kind):
            return kind(str(failure))
        return kind(
            f"{self.objects.url}: {failure} ({failure.reason}); what is cached still answers"
        )

    def close(self) -> None:
        """End its threads; idempotent."""
        self.calls.close()


def as_failure(error: StoreUnavailable) -> Failure:
    """Why an object could not be read."""
    failure = Failure(_reason(error), str(error))
    failure.__cause__ = error
    return failure


def _reason(error: StoreUnavailable) -> Reason:
    if isinstance(error, ObjectNotFound):
        return "missing"
    text = f"{error} {error.__cause__ or ''}".lower()
    for sign, reason in _SIGNS:
        if sign in text:
            return reason
    return "unreachable"


_SIGNS: tuple[tuple[str, Reason], ...] = (
    ("truncated", "short"),
    # a range that begins after the end of an object
    ("range was invalid", "short"),
    ("invalid range", "short"),
    ("status code: 416", "short"),
    ("credentials", "denied"),
    ("timed out", "late"),
    ("timeout", "late"),
    ("server error", "refused"),  # as HTTP libraries name 500 to 599
    ("too many requests", "refused"),
    ("server returned", "refused"),
)
