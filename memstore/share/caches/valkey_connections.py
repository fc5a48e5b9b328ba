"""Connections to a Valkey or Redis server, or to the servers of a cluster: made by redis-py, each
used by one at a time; and what becomes of its errors.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from memstore.errors import InvalidInput, install_extra
from memstore.share.caches.valkey_replies import is_idle
from memstore.share.calls.failures import Failure
from memstore.share.objects.object_errors import without_credentials

_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
NOBODY = "nobody"  # no name of a server: host:port
UNCOVERED = "no server of the cluster has these keys"
_CONNECT = 2.0  # seconds
_AGAIN = 1.0  # seconds after which a cluster may be asked anew which server has which keys


class Connections:
    """Connections by server. Safe for several threads; in a forked child it connects anew."""

    def __init__(self, url: str, *, timeout: float = 5.0) -> None:
        """url: redis://host:port/0, rediss://, unix://; with ?cluster=true of a cluster, any of its
        servers. timeout: of one command, in seconds. Nothing is connected yet. Raises InvalidInput.
        """
        self.shown = without_credentials(url)
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            raise InvalidInput(
                f"{self.shown}: it is no URL of a Valkey server; give redis://host:port, and a "
                "password in VALKEY_PASSWORD"
            ) from None
        if parts.scheme not in _SCHEMES:
            raise InvalidInput(
                f"{self.shown}: unknown scheme {parts.scheme!r} of a Valkey server; give "
                "redis://host:port"
            )
        query = parse_qs(parts.query)
        self.cluster = query.pop("cluster", ["false"])[0] == "true"
        if query:
            raise InvalidInput(
                f"{self.shown}: unknown setting {min(query)!r}; there is cluster=true"
            )
        scheme = {"valkey": "redis", "valkeys": "rediss"}.get(parts.scheme, parts.scheme)
        self._url = urlunsplit((scheme, parts.netloc, parts.path, "", ""))
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: Any = None
        self._idle: dict[str, list[Any]] = {}  # connections that wait to be used, by server
        self._asked_anew, self._outdated = 0.0, False  # who has which keys, of a cluster
        self._pid = os.getpid()
        self._redis()

    def _redis(self) -> Any:
        try:
            import redis
        except ImportError as error:
            raise InvalidInput(f"a Valkey cache needs redis: {install_extra('share')}") from error
        return redis

    def _connected(self) -> Any:
        with self._lock:
            self._after_fork()
            if self._client is None:
                redis = self._redis()
                # Trying again is decided elsewhere, within the deadline of a read.
                settings: dict[str, Any] = {
                    "protocol": 2,
                    "socket_timeout": self._timeout,
                    "socket_connect_timeout": min(_CONNECT, self._timeout),
                    "username": os.environ.get("VALKEY_USERNAME"),
                    "password": os.environ.get("VALKEY_PASSWORD"),
                }
                settings = {name: value for name, value in settings.items() if value is not None}
                settings["retry"] = _once(redis)
                kind = redis.Redis
                if self.cluster:
                    kind, settings["require_full_coverage"] = redis.cluster.RedisCluster, False
                self._client = kind.from_url(self._url, **settings)
            return self._client

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._client, self._idle = os.getpid(), None, {}

    def asked(self, work: Callable[[Any], Any]) -> Any:
        """What a function of the client returns. Raises Failure."""
        redis = self._redis()
        denied = (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)
        try:
            return work(self._connected())
        except redis.exceptions.TimeoutError as error:
            raise Failure("late", f"{self.shown}: no answer in time") from error
        except denied as error:
            raise Failure("denied", f"{self.shown} refuses access") from error
        except (redis.exceptions.ConnectionError, OSError) as error:
            raise Failure("unreachable", f"{self.shown}: {type(error).__name__}") from error
        except redis.exceptions.OutOfMemoryError as error:
            raise Failure("full", f"{self.shown}: {error}") from error
        except redis.exceptions.RedisError as error:
            raise Failure("refused", f"{self.shown}: {type(error).__name__}") from error
        except redis.exceptions.SlotNotCoveredError as error:
            raise Failure("refused", f"{self.shown}: {UNCOVERED}") from error
        except redis.exceptions.RedisClusterException as error:  # it is no RedisError
            if isinstance(error.__cause__, denied):
                raise Failure("denied", f"{self.shown} refuses access") from error
            what = f"{self.shown}: no server of the cluster answers"
            raise Failure("unreachable", what) from error
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            # the client's own, where a server dies in the middle of an answer
            raise Failure("unreachable", f"{self.shown}: {type(error).__name__}") from error

    def outdated(self) -> None:
        """Ask a cluster anew which server has which keys, soon."""
        self._outdated = True

    def up_to_date(self, client: Any) -> Any:
        """The client of a cluster; who has which keys is asked anew after a server failed."""
        with self._lock:
            now = time.monotonic()
            outdated = self._outdated and now - self._asked_anew >= _AGAIN
            if outdated:
                self._outdated, self._asked_anew = False, now
        if outdated:
            try:
                client.nodes_manager.initialize()
            except BaseException:
                self._outdated = True
                raise
        return client

    def server_of(self, client: Any, key: str) -> str:
        """The server of a cluster that has a key; NOBODY. Raises Failure."""

        def name(_: Any) -> str:
            try:
                return str(client.get_node_from_key(key).name)
            except self._redis().exceptions.SlotNotCoveredError:
                return NOBODY

        found: str = self.asked(name)
        return found

    def failed(self, server: str) -> None:
        """A server of a cluster is away, or has not the keys that it had."""
        with self._lock:
            self._outdated = True
            idle = self._idle.pop(server, [])
        for connection in idle:
            connection.disconnect()

    def take(self, server: str, connecting: Callable[[Callable[[], Any]], Any]) -> Any:
        """A connection to a server that nobody else uses. Raises Failure."""
        while True:
            with self._lock:
                self._after_fork()
                idle = self._idle.get(server)
                connection = idle.pop() if idle else None
            if connection is None:
                return connecting(lambda: self.asked(lambda client: self._connect(client, server)))
            if is_idle(connection._sock):
                return connection
            connection.disconnect()  # the server has ended it

    def _connect(self, client: Any, server: str) -> Any:
        if server:
            client = client.get_redis_connection(client.get_node(node_name=server))
        pool = client.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        return connection

    def give_back(self, server: str, connection: Any) -> None:
        """A connection over which nothing more will come may be used again."""
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._idle.setdefault(server, []).append(connection)
                return
        connection.disconnect()

    def close(self) -> None:
        """Close its connections; more than once is the same as once."""
        with self._lock:
            client, self._client = self._client, None
            idle, self._idle = self._idle, {}
        if client is not None and self._pid == os.getpid():
            for connections in idle.values():
                for connection in connections:
                    connection.disconnect()
            client.close()


def _once(redis: Any) -> Any:
    """Commands are not tried again by the client."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Retry(NoBackoff(), 0)
