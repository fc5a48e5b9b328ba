"""Object stores for tests: in memory, with counted calls, and stopped at a call."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from memstore.share.object_store import ObjectStore
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

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, what: Any, *more: Any) -> Any:
        number = len(self.calls)
        self.calls.append((name, what))
        if name in ("create", "put"):
            self.sent += len(more[0])
        self.before(number, name, what)
        result = getattr(self.inner, name)(what, *more)
        self.after(number, name, what)
        if name in ("get", "get_range"):
            self.read += len(result)
        return iter(list(result)) if name == "names" else result
