"""An object store that is far away."""

import time
from collections.abc import Sequence

from memstore.share.objects.object_store import OBJECT_BYTES, ObjectStore


class Distant(ObjectStore):
    """A place every request of which takes longer, counted."""

    def __init__(self, place: ObjectStore, seconds: float) -> None:
        self.__dict__.update(place.__dict__)
        self.seconds, self.requests, self.read = seconds, 0, 0

    def _wait(self) -> None:
        self.requests += 1
        time.sleep(self.seconds)

    def get(self, name: str, most: int = OBJECT_BYTES) -> memoryview:
        self._wait()
        found = super().get(name, most)
        self.read += len(found)
        return found

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self._wait()
        found = super().get_ranges(name, ranges)
        self.read += sum(map(len, found))
        return found

    def first(self, prefix: str) -> str | None:
        self._wait()
        return super().first(prefix)
