"""The ASGI app: the routes of every endpoint, behind the checks that all requests pass."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from memstore import __version__
from memstore.serve.http import chat, document_routes, error_responses, inspector, mcp_route
from memstore.serve.http.checks import Checks, ReadsAll
from memstore.serve.metrics import ServerMetrics
from memstore.serve.service import Service


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
    error_responses.install(app)
    for router in (
        chat.router(service),
        document_routes.router(service),
        inspector.router(service),
        mcp_route.router(service.tools, most_bytes=service.settings.json_bytes),
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
