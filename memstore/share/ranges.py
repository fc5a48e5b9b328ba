"""Reading many parts of objects by few requests: parts that lie close together are read by one."""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from memstore.errors import CorruptMemory, MemstoreError, StoreUnavailable
from memstore.share.parallel import at_once

OBJECT_BYTES = 256 << 20  # of any object that is read whole; manifests may be the largest
_GAP = 128 << 10  # bytes between two parts that are read rather than asked for apart
_MOST = 4 << 20  # bytes of one request: two smaller ones in parallel are faster than a larger one
_AT_ONCE = 64  # requests in parallel


class Extent(NamedTuple):
    """Consecutive bytes of an object."""

    name: str
    offset: int
    length: int


class Ranges(Protocol):
    """Objects that are read by ranges of bytes: an object store, or one exported file."""

    @property
    def url(self) -> str:
        """Where they are, for messages."""

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Bytes of an object, of exactly this length. Raises CorruptMemory, StoreUnavailable."""


def read_extents(objects: Ranges, extents: Sequence[Extent]) -> list[memoryview | MemstoreError]:
    """The bytes of each extent, or why they could not be read; all requests in parallel."""
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
            if isinstance(answer, MemstoreError):
                found[number] = answer
            else:
                found[number] = answer[offset - span.offset :][:length]
    return found


def _spans(extents: Sequence[Extent]) -> list[tuple[Extent, list[int]]]:
    """What each request reads, with the numbers of the extents in it: one for extents of an object
    that lie up to _GAP bytes apart, of _MOST bytes together.
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
