"""A Valkey or Redis server, or a cluster of them, as a cache that readers share: one value a
record, which it may lose at any time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from memstore.share.caches.valkey_connections import NOBODY, UNCOVERED, Connections
from memstore.share.caches.valkey_replies import Parts, Replies, Run, requests
from memstore.share.calls.failures import Failure

_ONE = ""  # the server where there is no cluster
_SENT_BYTES = 4 << 20  # that are sent together, about
_ASKED_BYTES = 4 << 20  # that are asked for together, about
_AHEAD = 2  # such requests that are under way: a server prepares one while another is received
# Why a cluster is asked anew which server has which keys.
_ELSEWHERE = frozenset({"late", "unreachable", "refused"})


class Valkey:
    """Values by key. Safe for several threads; in a forked child it connects anew."""

    def __init__(self, url: str, *, ttl: float | None = None, timeout: float = 5.0) -> None:
        """url, timeout: see Connections. ttl: seconds after which a value may be forgotten. Nothing
        is connected yet. Raises InvalidInput.
        """
        self._connections = Connections(url, timeout=timeout)
        self.shown = self._connections.shown
        self._ttl = None if ttl is None else max(1, round(1000 * ttl))

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
            self._connections.outdated()
            yield range(len(keys)), [failure] * len(keys)
            return
        if _ONE in servers:
            yield from self._receive_from(_ONE, keys, wanted, size, until, connecting)
            return
        nobody = servers.pop(NOBODY, ())
        if nobody:
            self._connections.outdated()
            uncovered = Failure("refused", f"{self.shown}: {UNCOVERED}")
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
                    self._connections.failed(server)
                yield [places[number] for number in run], replies

    def _by_server(
        self, keys: Sequence[str], connecting: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Sequence[int]]:
        """The places of the keys that each server has, and NOBODY; _ONE, of no cluster. Raises
        Failure.
        """
        if not self._connections.cluster:
            return {_ONE: range(len(keys))}
        client = connecting(lambda: self._connections.asked(self._connections.up_to_date))
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._connections.server_of(client, key), []).append(place)
        return dict(places)

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
            connection = self._connections.take(server, connecting)
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
            self._connections.give_back(server, connection)
            connection = None
        except Failure as failure:
            if not asked:
                yield range(0), ()
            yield range(told, len(keys)), [failure] * (len(keys) - told)
        finally:
            if connection is not None:  # who knows what would come over it
                connection.disconnect()

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Keep values, as long as it likes. Raises Failure."""
        if self._connections.cluster:
            client, all_of_them = self._connections.asked(self._connections.up_to_date), len(items)
            items = [
                item for item in items if self._connections.server_of(client, item[0]) != NOBODY
            ]
            if len(items) < all_of_them:
                self._connections.outdated()
        at = 0
        while at < len(items):
            end, size = at, 0
            while end < len(items) and (end == at or size + len(items[end][1]) <= _SENT_BYTES):
                size += len(items[end][1])
                end += 1
            some = items[at:end]
            self._connections.asked(partial(self._set, items=some))
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
        self._connections.asked(lambda client: client.unlink(key))

    def close(self) -> None:
        """Close its connections; more than once is the same as once."""
        self._connections.close()
