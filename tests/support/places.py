"""Places for published memories: of each kind, counted, and stopped at a call."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memstore.share.object_store import OBJECT_BYTES, Found, ObjectStore
from memstore.share.open_object_store import open_object_store

_numbers = itertools.count()


def in_memory() -> ObjectStore:
    """A new place in this process's memory."""
    return open_object_store(f"memory://test-{next(_numbers)}")


class Killed(BaseException):
    """The process ends here."""


class WatchedPlace:
    """A place whose calls are counted, and told to `before` and `after` by name and arguments: what
    these raise ends the call.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner, self.url, self.identity = inner, inner.url, inner.identity
        self.calls: list[tuple[str, Any]] = []
        self.sent = self.read = 0  # bytes
        self.before: Callable[[int, str, Any], None] = lambda number, name, what: None
        self.after: Callable[[int, str, Any], None] = lambda number, name, what: None

    def _call(self, name: str, what: Any, *more: Any) -> Any:
        number = len(self.calls)
        self.calls.append((name, what))
        self.before(number, name, what)
        result = getattr(self.inner, name)(what, *more)
        self.after(number, name, what)
        return result

    def get(self, name: str, most: int = OBJECT_BYTES) -> memoryview:
        data = self._call("get", name, most)
        self.read += len(data)
        return data

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        found = self._call("get_range", name, offset, length)
        self.read += len(found)
        return found

    def create(self, name: str, data: bytes) -> bool:
        self.sent += len(data)
        return self._call("create", name, data)

    def put(self, name: str, data: bytes) -> None:
        self.sent += len(data)
        self._call("put", name, data)

    def names(self, prefix: str) -> Iterator[Found]:
        return iter(list(self._call("names", prefix)))

    def first(self, prefix: str) -> str | None:
        return self._call("first", prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete", names)

    def sweep(self, seconds: float) -> int:
        return self._call("sweep", seconds)
