"""POST /mcp: the MCP server over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from memstore.serve.http.checks import access_of
from memstore.serve.mcp.server import mcp_server
from memstore.serve.mcp.tools import Caller, MemoryTools


def router(tools: MemoryTools, *, most_bytes: int) -> APIRouter:
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
