"""A Valkey or Redis server, or a cluster of them, as a cache that readers share: one value a
record, which it may lose at any time.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from memstore.errors import InvalidInput, install_extra
from memstore.share.caches.valkey_replies import Parts, Replies, Run, is_idle, requests
from memstore.share.calls.failures import Failure
from memstore.share.objects.object_errors import without_credentials

_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
_SENT_BYTES = 4 << 20  # that are sent together, about
_ONE = ""  # the server where there is no cluster
_NOBODY = "nobody"  # no name of a server: host:port
_UNCOVERED = "no server of the cluster has these keys"
_ASKED_BYTES = 4 << 20  # that are asked for together, about
_AHEAD = 2  # such requests that are under way: a server prepares one while another is received
_CONNECT = 2.0  # seconds
# Why a cluster is asked anew which server has which keys, and after how many seconds at least.
_ELSEWHERE, _AGAIN = frozenset({"late", "unreachable", "refused"}), 1.0


class Valkey:
    """Values by key. Safe for several threads; in a forked child it connects anew."""

    def __init__(self, url: str, *, ttl: float | None = None, timeout: float = 5.0) -> None:
        """url: redis://host:port/0, rediss://, unix://; with ?cluster=true of a cluster, any of its
        servers. ttl: seconds after which a value may be forgotten. timeout: of one command, in
        seconds. Nothing is connected yet. Raises InvalidInput.
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
        self._ttl = None if ttl is None else max(1, round(1000 * ttl))
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

    def receive(
        self,
        keys: Sequence[str],
        wanted: Sequence[Parts | None],
        size: int,
        until: float,
        connecting: Callable[[Callable[[], Any]], Any],
    ) -> Iterator[tuple[Sequence[int], Run]]:
        """The values of some keys, run by run, as they come: the places of the keys, and a reply
        for each; one Failure for all keys that could not be read for the same reason.

        wanted, size: see Replies.receive; nothing is written there any more once this ends. until:
        time.monotonic. connecting: returns what a function returns that may hang for longer, in
        time, or raises Failure.
        """
        try:
            servers = self._by_server(keys, connecting)
        except Failure as failure:
            self._outdated = True
            yield range(len(keys)), [failure] * len(keys)
            return
        if _ONE in servers:
            yield from self._receive_from(_ONE, keys, wanted, size, until, connecting)
            return
        nobody = servers.pop(_NOBODY, ())
        if nobody:
            self._outdated = True
            uncovered = Failure("refused", f"{self.shown}: {_UNCOVERED}")
            yield nobody, [uncovered] * len(nobody)
        streams = []
        for server, places in servers.items():
            of = [keys[place] for place in places], [wanted[place] for place in places]
            stream = self._receive_from(server, *of, size, until, connecting)
            next(stream)  # all of them are asked before one is waited for
            streams.append((server, places, stream))
        for server, places, stream in streams:
            for run, replies in stream:
                if any(isinstance(one, Failure) and one.reason in _ELSEWHERE for one in replies):
                    self._failed(server)
                yield [places[number] for number in run], replies

    def _by_server(
        self, keys: Sequence[str], connecting: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Sequence[int]]:
        """The places of the keys that each server has, and _NOBODY; _ONE, of no cluster. Raises
        Failure.
        """
        if not self.cluster:
            return {_ONE: range(len(keys))}
        client = connecting(lambda: self._asked(self._up_to_date))
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._server_of(client, key), []).append(place)
        return dict(places)

    def _server_of(self, client: Any, key: str) -> str:
        """The server of a cluster that has a key; _NOBODY. Raises Failure."""

        def name(_: Any) -> str:
            try:
                return str(client.get_node_from_key(key).name)
            except self._redis().exceptions.SlotNotCoveredError:
                return _NOBODY

        found: str = self._asked(name)
        return found

    def _up_to_date(self, client: Any) -> Any:
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

    def _failed(self, server: str) -> None:
        """A server of a cluster is away, or has not the keys that it had."""
        with self._lock:
            self._outdated = True
            idle = self._idle.pop(server, [])
        for connection in idle:
            connection.disconnect()

    def _receive_from(
        self,
        server: str,
        keys: Sequence[str],
        wanted: Sequence[Parts | None],
        size: int,
        until: float,
        connecting: Callable[[Callable[[], Any]], Any],
    ) -> Iterator[tuple[range, Run]]:
        """The same from one server; what comes first is nothing, when it has been asked."""
        told, asked, connection = 0, False, None
        try:
            connection = self._take(server, connecting)
            replies = Replies(connection._sock, until, self.shown)
            each = max(1, _ASKED_BYTES // size)
            pieces = [(start, start + each) for start in range(0, len(keys), each)]
            for start, end in pieces[:_AHEAD]:
                replies.send(requests(keys[start:end]))
            asked = True
            yield range(0), ()
            for number, (start, end) in enumerate(pieces):
                for run, found in replies.receive(wanted[start:end], size):
                    told = start + run.stop
                    yield range(start + run.start, told), found
                for after in pieces[number + _AHEAD : number + _AHEAD + 1]:
                    replies.send(requests(keys[slice(*after)]))
            self._give_back(server, connection)
            connection = None
        except Failure as failure:
            if not asked:
                yield range(0), ()
            yield range(told, len(keys)), [failure] * (len(keys) - told)
        finally:
            if connection is not None:  # who knows what would come over it
                connection.disconnect()

    def _take(self, server: str, connecting: Callable[[Callable[[], Any]], Any]) -> Any:
        """A connection to a server that nobody else uses. Raises Failure."""
        while True:
            with self._lock:
                self._after_fork()
                idle = self._idle.get(server)
                connection = idle.pop() if idle else None
            if connection is None:
                return connecting(lambda: self._asked(lambda client: self._connect(client, server)))
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

    def _give_back(self, server: str, connection: Any) -> None:
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._idle.setdefault(server, []).append(connection)
                return
        connection.disconnect()

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Keep values, as long as it likes. Raises Failure."""
        if self.cluster:
            client, all_of_them = self._asked(self._up_to_date), len(items)
            items = [item for item in items if self._server_of(client, item[0]) != _NOBODY]
            if len(items) < all_of_them:
                self._outdated = True
        at = 0
        while at < len(items):
            end, size = at, 0
            while end < len(items) and (end == at or size + len(items[end][1]) <= _SENT_BYTES):
                size += len(items[end][1])
                end += 1
            some = items[at:end]
            self._asked(partial(self._set, items=some))
            at = end

    def _set(self, client: Any, items: Sequence[tuple[str, bytes]]) -> None:
        pipeline = client.pipeline(transaction=False)
        for key, value in items:
            pipeline.set(key, value, px=self._ttl)
        for answer in pipeline.execute(raise_on_error=False):
            if isinstance(answer, Exception):
                raise answer

    def drop(self, key: str) -> None:
        """Keep a value no longer. Raises Failure."""
        self._asked(lambda client: client.unlink(key))

    def _asked(self, work: Callable[[Any], Any]) -> Any:
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
            raise Failure("refused", f"{self.shown}: {_UNCOVERED}") from error
        except redis.exceptions.RedisClusterException as error:  # it is no RedisError
            if isinstance(error.__cause__, denied):
                raise Failure("denied", f"{self.shown} refuses access") from error
            what = f"{self.shown}: no server of the cluster answers"
            raise Failure("unreachable", what) from error
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            # the client's own, where a server dies in the middle of an answer
            raise Failure("unreachable", f"{self.shown}: {type(error).__name__}") from error

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
