"""The ASGI app, with the routes of every endpoint behind the checks that all requests pass; and
uvicorn, from binding an address to the graceful shutdown at a signal.
"""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from sse_starlette.sse import AppStatus
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from memstore import __version__
from memstore.errors import InvalidInput
from memstore.serve import chat, document_routes, inspector
from memstore.serve.api_keys import Keys
from memstore.serve.checks import Checks, ReadsAll, access_of, install_error_handlers
from memstore.serve.mcp_server import mcp_server
from memstore.serve.mcp_tools import Caller, MemoryTools
from memstore.serve.metrics import ServerMetrics
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings

_CLOSING_SECONDS = 4  # that connections have after the answers, to be closed
_IDLE_SECONDS = 30  # from an answer to the next request of its connection


def create_app(service: Service) -> FastAPI:
    """What serves a memory; closing the app ends the service."""

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.worker.refuse()

    app = FastAPI(
        title="memstore",
        version=__version__,
        lifespan=alive,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    install_error_handlers(app)
    for router in (
        chat.router(service),
        document_routes.router(service),
        inspector.router(service),
        _mcp(service.tools, most_bytes=service.settings.json_bytes),
        _metrics(service.metrics),
    ):
        app.include_router(router)
    settings = service.settings
    app.add_middleware(Checks, settings=settings, keys=service.keys)
    if settings.origins:  # outside of the checks: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _metrics(metrics: ServerMetrics | None) -> APIRouter:
    """GET /metrics, where the server counts."""
    routes = APIRouter()
    if metrics is not None:

        @routes.get("/metrics")
        def shown(access: ReadsAll) -> Response:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes


def _mcp(tools: MemoryTools, *, most_bytes: int) -> APIRouter:
    """The route: stateless, with the access of each request's key, and without files of the server.
    most_bytes: of a request.
    """
    AppStatus.disable_automatic_graceful_drain()  # it would cut off answers at a signal
    server = mcp_server(tools, lambda ctx: _caller(ctx.request))
    manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def alive(app: object) -> AsyncIterator[None]:
        nonlocal manager
        manager = StreamableHTTPSessionManager(
            server, stateless=True, max_request_body_size=most_bytes
        )
        async with manager.run():
            yield

    class Endpoint:
        """An ASGI app; Starlette would call a function with a request."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            assert manager is not None
            await manager.handle_request(scope, receive, send)

    routes = APIRouter(lifespan=alive)
    endpoint: Any = Endpoint()
    routes.add_route("/mcp", endpoint, methods=["POST"], include_in_schema=False)
    return routes


def _caller(request: Request) -> Caller:
    return Caller(access_of(request))


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
