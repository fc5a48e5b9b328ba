"""Read many ranges of objects with few requests: one request for ranges close together."""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from memstore.errors import CorruptMemory, MemstoreError, StoreUnavailable
from memstore.share.parallel import at_once

OBJECT_BYTES = 256 << 20  # largest object that is read whole
_GAP = 128 << 10  # largest gap between ranges of one request
_MOST = 4 << 20  # bytes of a request: two smaller parallel requests are faster than a larger one
_AT_ONCE = 64  # parallel requests


class Extent(NamedTuple):
    """Consecutive bytes of an object."""

    name: str
    offset: int
    length: int


class Ranges(Protocol):
    """Objects that are read by ranges of bytes: an object store, or one exported file."""

    @property
    def url(self) -> str:
        """The URL or path, for messages."""

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes of an object. Raises CorruptMemory, StoreUnavailable."""


def read_extents(objects: Ranges, extents: Sequence[Extent]) -> list[memoryview | MemstoreError]:
    """The bytes of each extent, or the error; all requests in parallel."""
    spans = _spans(extents)

    def read(span: tuple[Extent, list[int]]) -> memoryview | MemstoreError:
        try:
            return objects.get_range(*span[0])
        except (StoreUnavailable, CorruptMemory) as error:
            return error

    found: list[memoryview | MemstoreError] = [memoryview(b"")] * len(extents)
    for (span, numbers), answer in zip(spans, at_once(read, spans, _AT_ONCE)):
        for number in numbers:
            _, offset, length = extents[number]
            at = offset - span.offset
            found[number] = answer if isinstance(answer, MemstoreError) else answer[at:][:length]
    return found


def _spans(extents: Sequence[Extent]) -> list[tuple[Extent, list[int]]]:
    """The range of each request, and the numbers of its extents: extents of one object with gaps of
    up to _GAP bytes, and up to _MOST bytes together.
    """
    spans: list[tuple[Extent, list[int]]] = []
    for number, (name, offset, length) in sorted(enumerate(extents), key=itemgetter(1)):
        if spans and spans[-1][0].name == name:
            last, numbers = spans[-1]
            end = max(last.offset + last.length, offset + length)
            if offset - last.offset - last.length <= _GAP and end - last.offset <= _MOST:
                numbers.append(number)
                spans[-1] = last._replace(length=end - last.offset), numbers
                continue
        spans.append((Extent(name, offset, length), [number]))
    return spans
