"""uvicorn, from binding an address to the graceful shutdown at a signal."""

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from memstore.errors import InvalidInput
from memstore.serve.api_keys import Keys
from memstore.serve.http.app import create_app
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings

_CLOSING_SECONDS = 4  # that connections have after the answers, to be closed
_IDLE_SECONDS = 30  # from an answer to the next request of its connection


def check_exposed(settings: ServeSettings, keys: Keys) -> None:
    """Raises InvalidInput for an address that other machines can reach, without keys."""
    if not settings.loopback and not keys.known:
        raise InvalidInput(
            f"{settings.host} can be reached by other machines; give --api-key-file, or listen on "
            "127.0.0.1"
        )


def configured(service: Service) -> uvicorn.Config:
    """The configuration of uvicorn for a service."""
    return uvicorn.Config(
        create_app(service),
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(service.settings.grace) + _CLOSING_SECONDS,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=1 << 16,
    )


def serve(service: Service, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM; then new requests are refused, answers finish, and ingests
    stop at the end of a chunk. ready: called with the URL once the server answers.

    Raises InvalidInput for an address that is not free.
    """
    settings = service.settings
    check_exposed(settings, service.keys)
    with _bound(settings) as listening:
        config = configured(service)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        gc.freeze()  # no collection looks through the model's objects
        _Server(config, service, lambda: ready(f"http://{shown}:{port}")).run([listening])


class _Server(uvicorn.Server):
    """Stops the service before it waits for connections."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        worker = self._service.worker
        worker.refuse()
        asyncio.get_running_loop().call_later(self._service.settings.grace, worker.cut_off)
        await super().shutdown(sockets)


@contextmanager
def _bound(settings: ServeSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise InvalidInput(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another "
            "--host or --port"
        ) from None
    with listening:
        yield listening
