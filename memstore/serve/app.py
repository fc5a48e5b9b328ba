"""The ASGI app with its routes and checks, and uvicorn from binding to graceful shutdown."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from mcp.server.transport_security import TransportSecuritySettings
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from memstore import __version__
from memstore.errors import InvalidInput
from memstore.serve import chat, documents, inspector
from memstore.serve.access import Checks, Keys, access_of
from memstore.serve.api_errors import install_error_handlers
from memstore.serve.mcp_server import mcp_server
from memstore.serve.service import Service
from memstore.serve.settings import LOOPBACK, ServeSettings, in_url

_CLOSING_SECONDS = 4  # for connections to close after the last answers
_IDLE_SECONDS = 30  # keep-alive of an idle connection


def create_app(service: Service) -> FastAPI:
    """The app that serves a memory."""
    app = FastAPI(title="memstore", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app, service.metrics.failed)
    for router in (
        chat.router(service),
        documents.router(service.documents),
        inspector.router(service),
        _mcp(service),
    ):
        app.include_router(router)
    app.mount("/page", inspector.Page())
    settings = service.settings
    app.add_middleware(Checks, settings=settings, keys=service.keys)
    if settings.origins:  # before the checks: a preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _mcp(service: Service) -> APIRouter:
    """The stateless route; read-only keys get no tools that write."""
    AppStatus.disable_automatic_graceful_drain()  # it would end answers at a signal
    sessions = {}
    for write in {False, not service.store.read_only}:
        server = mcp_server(service, access_of, write=write)
        server.streamable_http_app(
            stateless_http=True,
            max_request_body_size=service.settings.json_bytes,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        sessions[write] = server.session_manager

    @asynccontextmanager
    async def alive(app: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            for session in sessions.values():
                await running.enter_async_context(session.run())
            yield

    class Endpoint:
        """An ASGI app as an object; Starlette would call a function with a request."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            write = service.documents.writable(scope["state"]["access"])
            await sessions[write].handle_request(scope, receive, send)

    routes = APIRouter(lifespan=alive)
    endpoint: Any = Endpoint()
    routes.add_route("/mcp", endpoint, methods=["POST"], include_in_schema=False)
    return routes


def check_exposed(settings: ServeSettings, keys: Keys) -> None:
    """Raises InvalidInput for an address that other machines can reach without keys."""
    if settings.host not in LOOPBACK and not keys:
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
    """Serve until SIGINT or SIGTERM; then refuse new requests, finish answers, and stop ingests at
    the end of a chunk. ready: called with the URL when the server accepts requests.

    Raises InvalidInput for an address in use.
    """
    settings = service.settings
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    host, port = settings.host, settings.port
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        message = f"cannot listen on {host}:{port}: {why}; choose another --host or --port"
        raise InvalidInput(message) from None
    with listening:
        host, port = listening.getsockname()[:2]
        gc.freeze()  # excludes the model's objects from garbage collection
        try:
            _Server(service, lambda: ready(f"http://{in_url(host)}:{port}")).run([listening])
        finally:
            gc.unfreeze()  # or triton reports its objects as leaked at the end of the process


class _Server(uvicorn.Server):
    """Stops the service before waiting for connections."""

    def __init__(self, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(configured(service))
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        worker = self._service.worker
        worker.refuse()
        asyncio.get_running_loop().call_later(self._service.settings.grace, worker.cut_off)
        await super().shutdown(sockets)
