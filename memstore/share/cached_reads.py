"""Read checked values of a publication from the local cache, the shared cache or the object store,
in this order. Damaged values are requested again, and caches store the values that they lacked.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from memstore.errors import CorruptMemory, MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.share.contents import Contents, Entry, Place, check_digest, read_contents
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from memstore.share.ranges import Extent, read_extents
from memstore.share.valkey import Valkey
from memstore.tiers.slots import TierCounter

V = TypeVar("V")

_HELD = 4096  # contents of documents, and parts of tokens, cached in main memory
_TRIES = 3  # reads of a missing or damaged value

Check = Callable[[int, memoryview], object]
"""Takes the number of a value and bytes; raises CorruptMemory if these are not its bytes."""


class Read(NamedTuple):
    """A value, and the tier that had it."""

    data: memoryview
    tier: str  # "local", "valkey" or "remote"


class CachedReads:
    """The tiers below the host tier. May be used by several threads."""

    def __init__(
        self, objects: ObjectStore, local: LocalCache | None, shared: Valkey | None
    ) -> None:
        self.objects, self._shared = objects, shared
        self.caches: dict[str, LocalCache | Valkey] = {}
        if local is not None:
            self.caches["local"] = local
        if shared is not None:
            self.caches["valkey"] = shared
        self.counters: Mapping[str, TierCounter] = {
            **{tier: cache.counter for tier, cache in self.caches.items()},
            "remote": TierCounter(),
        }
        self._contents: dict[Place, Contents] = {}
        self._tokens: dict[Place, bytes] = {}

    def read(
        self,
        names: Sequence[str],
        most: int,
        check: Check,
        locate: Callable[[list[int]], Sequence[Extent | MemstoreError]],
    ) -> tuple[list[Read | MemstoreError], dict[str, float]]:
        """The values of these names, or the error of each; and the seconds of each tier.

        most: most bytes of a value. locate: takes numbers of values that no cache has, and returns
        their places in the object store.
        """
        found: dict[int, Read | MemstoreError] = {}
        seconds: dict[str, float] = {}
        left = list(range(len(names)))
        for tier, cache in self.caches.items():
            began = time.perf_counter()
            values = cache.get_many([names[number] for number in left], most) if left else []
            for number, value in zip(left, values):
                try:
                    if value is not None:
                        check(number, memoryview(value))
                        found[number] = Read(memoryview(value), tier)
                except CorruptMemory:
                    cache.counter.failed("damaged")
                    cache.drop(names[number])
            left = [number for number in left if number not in found]
            seconds[tier] = time.perf_counter() - began
        began = time.perf_counter()
        found |= self._fetch(left, locate(left) if left else (), check)
        seconds["remote"] = time.perf_counter() - began
        self._keep(names, found)
        return [found[number] for number in range(len(names))], seconds

    def contents(self, entries: Sequence[Entry]) -> list[Contents]:
        """Contents of documents, cached in main memory. Raises as `places`."""
        of = {entry.contents: entry for entry in entries}
        return self._held(
            self._contents,
            [entry.contents for entry in entries],
            lambda place, data: read_contents(self.objects, of[place], data),
        )

    def tokens(self, places: Sequence[Place]) -> list[bytes]:
        """Bytes of tokens at these places, cached in main memory. Raises as `places`."""
        return self._held(self._tokens, places, lambda place, data: bytes(data))

    def _held(
        self, held: dict[Place, V], places: Sequence[Place], make: Callable[[Place, memoryview], V]
    ) -> list[V]:
        """Values of places, from `held` or made of their bytes."""
        values = {place: value for place in places if (value := held.get(place)) is not None}
        missing = [place for place in dict.fromkeys(places) if place not in values]
        new = {place: make(place, data) for place, data in zip(missing, self.places(missing))}
        if len(held) + len(new) > _HELD:
            held.clear()
        held.update(new)
        values |= new
        return [values[place] for place in places]

    def places(self, places: Sequence[Place]) -> list[memoryview]:
        """Bytes of objects, read concurrently. Raises CorruptMemory, StoreUnavailable."""
        # objects never change, so a place is a key of the caches
        names = [f"{self.objects.identity}:{p.name}:{p.offset}:{p.length}" for p in places]
        found, _ = self.read(
            names,
            max((place.length for place in places), default=0),
            lambda number, data: check_digest(self.objects, places[number], data),
            lambda left: [places[number].extent for number in left],
        )
        data: list[memoryview] = []
        for answer in found:
            if isinstance(answer, MemstoreError):
                raise answer
            data.append(answer.data)
        return data

    def _fetch(
        self, numbers: Sequence[int], places: Sequence[Extent | MemstoreError], check: Check
    ) -> dict[int, Read | MemstoreError]:
        """Values read from the object store, by number."""
        found: dict[int, Read | MemstoreError] = {
            n: place for n, place in zip(numbers, places) if isinstance(place, MemstoreError)
        }
        left = {n: place for n, place in zip(numbers, places) if isinstance(place, Extent)}
        for _ in range(_TRIES):
            for number, answer in zip(left, read_extents(self.objects, [*left.values()])):
                try:
                    if isinstance(answer, MemstoreError):
                        raise answer
                    check(number, answer)
                    found[number] = Read(answer, "remote")
                except (StoreUnavailable, CorruptMemory) as error:
                    self.counters["remote"].failed(_reason(error))
                    found[number] = error
            again = (CorruptMemory, ObjectNotFound)
            left = {n: place for n, place in left.items() if isinstance(found[n], again)}
            if not left:
                break
        return found

    def _keep(self, names: Sequence[str], found: Mapping[int, Read | MemstoreError]) -> None:
        """Store values in the caches that lacked them."""
        asked: set[str] = set()
        for tier, cache in self.caches.items():
            asked.add(tier)
            items = [
                (names[number], bytes(read.data))
                for number, read in found.items()
                if isinstance(read, Read) and read.tier not in asked
            ]
            if items:
                cache.put(items)

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._shared is not None:
            self._shared.close()


def _reason(error: MemstoreError) -> str:
    """Why a read failed, for statistics."""
    if isinstance(error, ObjectNotFound):
        return "missing"
    return "unavailable" if isinstance(error, StoreUnavailable) else "damaged"
