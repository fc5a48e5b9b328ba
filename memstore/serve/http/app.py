"""The app: the routers of every room's file, behind the checks that all requests pass."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.serve import api_errors, telemetry
from memstore.serve.http import inspector
from memstore.serve.http.checks import Checks
from memstore.serve.http.openai import (
    chat,
    completions,
    conversation_routes,
    files,
    models,
    responses,
    vector_store_files,
    vector_stores,
)
from memstore.serve.mcp import server as mcp
from memstore.serve.service import Service

_ROUTERS = (
    models.router,
    chat.router,
    completions.router,
    responses.router,
    telemetry.router,
    conversation_routes.router,
    inspector.router,
    files.router,
    vector_stores.router,
    vector_store_files.router,
    mcp.router,
)


_BETWEEN = 30.0  # seconds


async def _tidy(service: Service) -> None:
    """Forget what is old, now and then."""
    while True:
        await asyncio.sleep(_BETWEEN)
        with suppress(MemstoreError):
            await run_in_threadpool(service.tidying.tidy)


def create_app(service: Service) -> FastAPI:
    """What serves a memory; closing the app ends the service."""

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(service))
        try:
            yield
        finally:
            tidying.cancel()
            service.worker.refuse()

    app = FastAPI(
        title="memstore",
        version=__version__,
        lifespan=alive,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    api_errors.install(app)
    for router in _ROUTERS:
        app.include_router(router(service))
    app.add_middleware(Checks, service=service)
    if service.settings.origins:  # outside of the checks: a browser asks first, without a key
        origins = list(service.settings.origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app
