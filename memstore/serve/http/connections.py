"""Connection limits: seconds until a request's headers have come, and how many may be open."""

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # for the headers of a connection's first request
IDLE_SECONDS = 30.0  # from an answer to the headers of the next request
_MOST = 4096


def most_connections() -> int:
    """How many may be open: the process needs descriptors for files, too."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if soft == resource.RLIM_INFINITY else max(8, min(_MOST, soft * 3 // 4))


class Connection(H11Protocol):
    """One that is closed where headers do not come in time, however slowly they do come; where too
    many are open, the one that waits longest for headers is closed for a new one.

    uvicorn's own timeout begins anew with every byte, and ends none that has asked nothing yet.
    """

    _waits_until: asyncio.TimerHandle | None = None  # for headers; None while an answer is made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio's."""
        super().connection_made(transport)
        self._await_headers(HEADER_SECONDS)
        if len(self.connections) > most_connections():
            waiting = [one for one in self.connections if isinstance(one, Connection)]
            min(waiting, key=Connection._ends).give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's."""
        self._have_headers()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """As uvicorn's: where a request has come, its answer is made from here on."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._have_headers()

    def on_response_complete(self) -> None:
        """As uvicorn's; the next request may be there already."""
        self._await_headers(IDLE_SECONDS)
        super().on_response_complete()

    def give_up(self) -> None:
        """Close it without a word: nothing was asked."""
        self._have_headers()
        self.connections.discard(self)
        self.transport.abort()

    def _ends(self) -> float:
        return float("inf") if self._waits_until is None else self._waits_until.when()

    def _await_headers(self, seconds: float) -> None:
        self._have_headers()
        if not self.transport.is_closing():
            self._waits_until = self.loop.call_later(seconds, self.give_up)

    def _have_headers(self) -> None:
        if self._waits_until is not None:
            self._waits_until.cancel()
            self._waits_until = None
