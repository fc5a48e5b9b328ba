"""A Valkey or Redis server as a cache that readers share: one value a record.

The server may lose, evict or change a value at any time, so readers check each value as they check
what the object store returns. A server that is unreachable or slow is skipped for some seconds.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from memstore.errors import InvalidInput, install_extra
from memstore.share.calls import Calls, Failure, Reason
from memstore.share.object_store import without_credentials
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_SENT_BYTES = 4 << 20  # of values that are sent in one request, about


class Valkey:
    """Values by key. May be used by several threads."""

    def __init__(self, url: str, *, timeout: float = 2.0) -> None:
        """Check the URL; nothing is connected yet.

        url: redis://host:port/0 or rediss://. User and password may come from VALKEY_USERNAME and
        VALKEY_PASSWORD. timeout: seconds that one call may take. Raises InvalidInput.
        """
        self.shown = without_credentials(url)
        self.counter = TierCounter()  # counts every failed call
        self._timeout = timeout
        self._calls = Calls(self.counter, name="memstore-valkey")
        redis = _redis()
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        settings: dict[str, Any] = {
            name: value
            for name in ("username", "password")
            if (value := os.environ.get(f"VALKEY_{name.upper()}"))
        }
        self._client = redis.Redis.from_url(
            self._parse(url),
            protocol=2,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # a cache that fails is passed over
            **settings,
        )

    def _parse(self, url: str) -> str:
        """The URL as redis-py takes it."""
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            raise InvalidInput(
                f"{self.shown}: not the URL of a Valkey server; give redis://host:port, and a "
                "password in VALKEY_PASSWORD"
            ) from None
        if parts.scheme not in _SCHEMES:
            raise InvalidInput(
                f"{self.shown}: unknown scheme {parts.scheme!r} of a Valkey server; give "
                "redis://host:port"
            )
        if parts.query:
            raise InvalidInput(f"{self.shown}: its URL takes no settings; remove them")
        return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, parts.path, "", ""))

    def get_many(self, keys: Sequence[str], most: int, until: float) -> list[bytes | None]:
        """The value of each key, None where there is none, by `until` (time.monotonic) at the
        latest. No more than most + 1 bytes of a value are received. Raises Failure.
        """

        def get() -> list[bytes | None]:
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(key, 0, most)
            return [value or None for value in pipeline.execute()]

        return self._call(get, until)

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store values by key. Raises Failure."""
        pipeline, size = self._client.pipeline(transaction=False), 0
        for number, (key, value) in enumerate(items, 1):
            pipeline.set(key, value)
            size += len(value)
            if size >= _SENT_BYTES or number == len(items):
                self._call(pipeline.execute)
                size = 0

    def drop(self, key: str) -> None:
        """Delete a value. Raises Failure."""
        self._call(lambda: self._client.unlink(key))

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._calls.close()
        self._client.close()

    def _call(self, work: Callable[[], T], until: float = float("inf")) -> T:
        def tried() -> T:
            try:
                return work()
            except Exception as error:  # redis-py also raises errors of its parser
                raise Failure(_reason(error), f"{self.shown}: {type(error).__name__}") from error

        return self._calls.call(tried, min(until, time.monotonic() + self._timeout))


def _redis() -> Any:
    try:
        import redis
    except ImportError as error:
        raise InvalidInput(f"a Valkey cache needs redis: {install_extra('share')}") from error
    return redis


def _reason(error: Exception) -> Reason:
    """Why a call of redis-py failed."""
    exceptions = _redis().exceptions
    denied = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    if isinstance(error, denied) or isinstance(error.__cause__, denied):
        return "denied"
    if isinstance(error, exceptions.TimeoutError):
        return "late"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "full"
    return "unreachable"
