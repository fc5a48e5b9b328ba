"""A Valkey or Redis server as a cache shared by readers: one value for each record.

The server may lose, evict or change a value at any time, so readers check each value as they check
data of the object store. redis-py's calls have timeouts; after a failure, the server is skipped for
some seconds.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memstore.errors import InvalidInput, install_extra
from memstore.share.object_store import without_credentials
from memstore.tiers.slots import TierCounter

T = TypeVar("T")

_SKIPPED = 5.0  # seconds after a failure without calls


class Valkey:
    """Values by key. Safe for several threads."""

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        """Check the URL, without connecting.

        url: redis://host:port/0 or rediss://. User and password may come from VALKEY_USERNAME and
        VALKEY_PASSWORD. timeout: seconds without an answer. Raises InvalidInput.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise InvalidInput(f"a Valkey cache needs redis: {install_extra('share')}") from error
        self.counter = TierCounter()
        self.skips_until = 0.0  # time.monotonic: a hanging server costs its timeout once
        settings: dict[str, Any] = {
            name: value
            for name in ("username", "password")
            if (value := os.environ.get(f"VALKEY_{name.upper()}"))
        }
        try:
            if "?" in url:
                raise ValueError("it has query parameters")
            self._client = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),  # a failing cache is skipped
                **settings,
            )
        except ValueError:
            raise InvalidInput(
                f"{without_credentials(url)}: not the URL of a Valkey server; give "
                "redis://host:port or rediss://, and a password in VALKEY_PASSWORD"
            ) from None

    def get_many(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        """The value of each key; None if it is missing, or the server fails, which is counted.
        Receives at most most + 1 bytes of a value.
        """

        def get() -> list[bytes | None]:
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(key, 0, most)
            return [value or None for value in pipeline.execute()]

        return self._call(get) or [None] * len(keys)

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Store one or more values by key; failures are counted."""
        self._call(lambda: self._client.mset(dict(items)))

    def drop(self, key: str) -> None:
        """Delete a value; failures are counted."""
        self._call(lambda: self._client.unlink(key))

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._client.close()

    def _call(self, work: Callable[[], T]) -> T | None:
        """The result of a call, or None if it fails or the server is skipped."""
        if time.monotonic() < self.skips_until:
            return None
        try:
            return work()
        except Exception:  # redis-py also raises its parser's errors
            self.counter.failed("unavailable")
            self.skips_until = time.monotonic() + _SKIPPED
            return None
