"""Reading parts of objects: neighbouring ones in one request, all requests in parallel, each
checked by the caller's function, and given up at the deadline. obstore repeats requests that fail;
what arrives wrong is asked for again here.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from memstore.errors import ObjectNotFound, StoreUnavailable
from memstore.share.calls import Calls, Failure, Reason
from memstore.share.object_store import Extent, ObjectStore
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_GAP = 128 << 10  # bytes between two ranges that are read rather than asked for apart
_MOST = 4 << 20  # bytes of one request: two smaller ones in parallel are faster than a larger one
# Requests of one read in parallel, and where they have _SMALL bytes in the mean: those only wait.
_AT_ONCE, _SMALL_AT_ONCE, _SMALL = 32, 128, 64 << 10
# Bytes of one read within the deadline; more of them have longer, up to so many times.
_IN_TIME, _LONGEST = 32 << 20, 100.0
_TRIES = 3  # of extents that are missing or have wrong bytes: a store may answer late or wrongly


class Span(NamedTuple):
    """One request: bytes of an object, and the numbers of the extents that lie in them."""

    name: str
    offset: int
    length: int
    extents: list[int]


def coalesce(extents: Sequence[Extent]) -> list[Span]:
    """The requests that read some extents: one for extents of an object that lie up to _GAP bytes
    apart, of _MOST bytes together.
    """
    spans: list[Span] = []
    for number in sorted(range(len(extents)), key=lambda number: extents[number]):
        name, offset, length = extents[number]
        if spans and spans[-1].name == name:
            last = spans[-1]
            end = max(last.offset + last.length, offset + length)
            if offset - last.offset - last.length <= _GAP and end - last.offset <= _MOST:
                spans[-1] = last._replace(length=end - last.offset)
                last.extents.append(number)
                continue
        spans.append(Span(name, offset, length, [number]))
    return spans


class Remote:
    """The object store as a tier. May be used by several threads."""

    def __init__(self, objects: ObjectStore, *, deadline: float) -> None:
        """deadline: seconds of one read of up to 32 MB."""
        self.objects, self.deadline = objects, deadline
        self.counter = TierCounter()
        self.calls = Calls(self.counter, threads=_AT_ONCE, name="memstore-remote")

    def until(self, size: int = 0) -> float:
        """The deadline of a read of so many bytes that begins now (time.monotonic)."""
        return time.monotonic() + self.deadline * min(max(1.0, size / _IN_TIME), _LONGEST)

    def read(
        self, extents: Sequence[Extent], check: Callable[[int, memoryview], None], until: float
    ) -> list[memoryview | Failure]:
        """The bytes of some extents, or why they could not be read. check: takes the number of an
        extent and bytes, and raises Failure where they are not its bytes.
        """
        found: dict[int, memoryview | Failure] = {}
        left = list(range(len(extents)))
        for _ in range(_TRIES):
            spans = coalesce([extents[number] for number in left])
            small = sum(span.length for span in spans) <= _SMALL * len(spans)
            threads = _SMALL_AT_ONCE if small else _AT_ONCE
            answers = self.calls.gather([self._reading(span) for span in spans], until, threads)
            for span, answer in zip(spans, answers):
                for number in (left[at] for at in span.extents):
                    found[number] = answer
                    if isinstance(answer, Failure):
                        continue
                    start = extents[number].offset - span.offset
                    part = answer[start : start + extents[number].length]
                    try:
                        check(number, part)
                        found[number] = part
                    except Failure as failure:
                        self.counter.failed(failure.reason)
                        found[number] = failure
            left = [number for number in left if _may_pass(found[number])]
            if not left:
                break
        return [found[number] for number in range(len(extents))]

    def _reading(self, span: Span) -> Callable[[], memoryview]:
        def read() -> memoryview:
            try:
                return self.objects.get_range(span.name, span.offset, span.length)
            except StoreUnavailable as error:
                raise as_failure(error) from error

        return read

    def call(self, work: Callable[[], T]) -> T:
        """The result of another call of the store, within the deadline. Raises what the call
        raises, and StoreUnavailable.
        """

        def tried() -> T:
            try:
                return work()
            except StoreUnavailable as error:
                raise as_failure(error) from error

        try:
            return self.calls.call(tried, self.until())
        except Failure as failure:
            raise self.error(failure) from failure

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


def _may_pass(answer: memoryview | Failure) -> bool:
    return isinstance(answer, Failure) and answer.reason in ("missing", "damaged")


def _reason(error: StoreUnavailable) -> Reason:
    if isinstance(error, ObjectNotFound):
        return "missing"
    text = f"{error} {error.__cause__ or ''}".lower()
    for sign, reason in _SIGNS:
        if sign in text:
            return reason
    return "unreachable"


_SIGNS: tuple[tuple[str, Reason], ...] = (
    ("truncated", "damaged"),
    # a range that begins after the end of an object
    ("range was invalid", "damaged"),
    ("invalid range", "damaged"),
    ("status code: 416", "damaged"),
    ("credentials", "denied"),
    ("timed out", "late"),
    ("timeout", "late"),
)
