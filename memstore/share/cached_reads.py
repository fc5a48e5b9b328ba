"""Values of a publication from the local cache, the cache that readers share, or the object store,
in that order, each checked. Neighbouring parts of objects are read in one request, all requests in
parallel; what arrives wrong is asked for again. Caches store in the background what they lacked.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from memstore.errors import CorruptMemory, MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.share.background_writes import BackgroundWrites
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import Extent, ObjectStore
from memstore.share.parallel import at_once
from memstore.share.valkey import Valkey
from memstore.tiers.stats import TierCounter

_GAP = 128 << 10  # bytes between two parts that are read rather than asked for apart
_MOST = 4 << 20  # bytes of one request: two smaller ones in parallel are faster than a larger one
# Requests of one read in parallel, and where they have _SMALL bytes in the mean: those only wait.
_AT_ONCE, _SMALL_AT_ONCE, _SMALL = 32, 128, 64 << 10
_TRIES = 3  # of parts that are missing or wrong: a store may answer late or wrongly

Check = Callable[[int, memoryview], object]
"""Takes the number of a value and bytes; raises CorruptMemory where they are not its bytes."""


class Read(NamedTuple):
    """A value, and the tier that had it."""

    data: memoryview
    tier: str  # "local", "valkey" or "remote"


class CachedReads:
    """The tiers below the host tier. May be used by several threads."""

    def __init__(
        self, objects: ObjectStore, local: LocalCache | None, shared: Valkey | None
    ) -> None:
        self.objects = objects
        self.caches: dict[str, LocalCache | Valkey] = {}
        if local is not None:
            self.caches["local"] = local
        if shared is not None:
            self.caches["valkey"] = shared
        self.counters: Mapping[str, TierCounter] = {
            **{tier: cache.counter for tier, cache in self.caches.items()},
            "remote": TierCounter(),
        }
        self._writes = BackgroundWrites()

    def read(
        self,
        names: Sequence[str],
        most: int,
        check: Check,
        locate: Callable[[list[int]], Sequence[Extent | MemstoreError]],
        check_whole: Check = lambda number, data: None,
    ) -> tuple[list[Read | MemstoreError], dict[str, float]]:
        """The values of these names, or why each could not be read; and the seconds that each tier
        took.

        most: bytes of a value. locate: takes numbers of values that no cache has, and returns where
        the object store has them. check_whole: is called before caches store a value, in the
        background.
        """
        found: dict[int, Read | MemstoreError] = {}
        seconds: dict[str, float] = {}
        for tier, cache in self.caches.items():
            began = time.perf_counter()
            left = [number for number in range(len(names)) if number not in found]
            values = cache.get_many([names[number] for number in left], most) if left else []
            for number, value in zip(left, values):
                try:
                    if value is not None:
                        check(number, memoryview(value))
                        found[number] = Read(memoryview(value), tier)
                except CorruptMemory:
                    cache.counter.failed("damaged")
                    self._writes.add(partial(cache.drop, names[number]), 0)
            seconds[tier] = time.perf_counter() - began
        left = [number for number in range(len(names)) if number not in found]
        began = time.perf_counter()
        answers = self._fetch(locate(left), lambda at, data: check(left[at], data)) if left else []
        for number, answer in zip(left, answers):
            read = answer if isinstance(answer, MemstoreError) else Read(answer, "remote")
            found[number] = read
        seconds["remote"] = time.perf_counter() - began
        self._keep(names, found, check_whole)
        return [found[number] for number in range(len(names))], seconds

    def _fetch(
        self, places: Sequence[Extent | MemstoreError], check: Check
    ) -> list[memoryview | MemstoreError]:
        """The bytes of extents of the object store, or why they could not be read."""
        found: list[memoryview | MemstoreError] = [
            place if isinstance(place, MemstoreError) else memoryview(b"") for place in places
        ]
        left = {n: place for n, place in enumerate(places) if isinstance(place, Extent)}
        for _ in range(_TRIES):
            spans = coalesce(left)
            small = sum(span.length for span in spans) <= _SMALL * len(spans)
            answers = at_once(self._span, spans, _SMALL_AT_ONCE if small else _AT_ONCE)
            for span, answer in zip(spans, answers):
                for number in span.extents:
                    _, offset, length = left[number]
                    try:
                        if isinstance(answer, MemstoreError):
                            raise answer
                        part = answer[offset - span.offset :][:length]
                        check(number, part)
                        found[number] = part
                    except (StoreUnavailable, CorruptMemory) as error:
                        self.counters["remote"].failed(_reason(error))
                        found[number] = error
            again = (CorruptMemory, ObjectNotFound)
            left = {n: place for n, place in left.items() if isinstance(found[n], again)}
            if not left:
                break
        return found

    def _span(self, span: "Span") -> memoryview | MemstoreError:
        try:
            return self.objects.get_range(span.name, span.offset, span.length)
        except (StoreUnavailable, CorruptMemory) as error:
            return error

    def _keep(
        self, names: Sequence[str], found: Mapping[int, Read | MemstoreError], check_whole: Check
    ) -> None:
        """Store values in the caches that lacked them."""
        reads = {n: read for n, read in found.items() if isinstance(read, Read)}
        asked: set[str] = set()
        for tier, cache in self.caches.items():
            asked.add(tier)
            items = {n: bytes(read.data) for n, read in reads.items() if read.tier not in asked}

            def store(items: dict[int, bytes] = items, cache: Any = cache) -> None:
                whole = []
                for number, data in items.items():
                    with suppress(CorruptMemory):
                        check_whole(number, memoryview(data))
                        whole.append((names[number], data))
                cache.put(whole)

            if items:
                self._writes.add(store, sum(map(len, items.values())))

    def store(self, item: Callable[[], tuple[str, bytes]], size: int) -> None:
        """Store a value of about so many bytes, which `item` returns with its name, in all caches,
        in the background.
        """

        def put() -> None:
            named = [item()]
            for cache in self.caches.values():
                cache.put(named)

        if self.caches:
            self._writes.add(put, size)

    def settle(self) -> None:
        """Wait until the caches hold what was read."""
        self._writes.settle()

    def close(self) -> None:
        """End its thread, once what was read is written to the caches; idempotent."""
        self._writes.close()
        shared = self.caches.get("valkey")
        if isinstance(shared, Valkey):
            shared.close()


def _reason(error: MemstoreError) -> str:
    """Why a read failed, for statistics."""
    if isinstance(error, StoreUnavailable):
        return "missing" if isinstance(error, ObjectNotFound) else "unavailable"
    return "damaged"


class Span(NamedTuple):
    """One request: bytes of an object, and the numbers of the extents that lie in them."""

    name: str
    offset: int
    length: int
    extents: list[int]


def coalesce(extents: Mapping[int, Extent]) -> list[Span]:
    """The requests that read some extents, by number: one for extents of an object that lie up to
    _GAP bytes apart, of _MOST bytes together.
    """
    spans: list[Span] = []
    for number, (name, offset, length) in sorted(extents.items(), key=itemgetter(1)):
        if spans and spans[-1].name == name:
            last = spans[-1]
            end = max(last.offset + last.length, offset + length)
            if offset - last.offset - last.length <= _GAP and end - last.offset <= _MOST:
                spans[-1] = last._replace(length=end - last.offset)
                last.extents.append(number)
                continue
        spans.append(Span(name, offset, length, [number]))
    return spans
