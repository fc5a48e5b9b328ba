"""The ASGI app: the routes of every endpoint, behind the checks that all requests pass."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.serve.http import error_responses, inspector, mcp_route, metrics_route
from memstore.serve.http.checks import Checks
from memstore.serve.http.openai import (
    batch_routes,
    chat,
    completions,
    conversation_routes,
    files,
    models,
    responses,
    vector_store_files,
    vector_store_search,
    vector_stores,
)
from memstore.serve.http.openai.prompts import Backend
from memstore.serve.service import Service

_BETWEEN = 30.0  # seconds


async def _collect_garbage(service: Service) -> None:
    """Forget what is old, now and then."""
    while True:
        await asyncio.sleep(_BETWEEN)
        with suppress(MemstoreError):
            await run_in_threadpool(service.collect_garbage)


def create_app(service: Service) -> FastAPI:
    """What serves a memory; closing the app ends the service."""

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        collecting = asyncio.create_task(_collect_garbage(service))
        try:
            yield
        finally:
            collecting.cancel()
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
    for router in (*_openai(service), *_others(service)):
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


def _openai(service: Service) -> tuple[APIRouter, ...]:
    """OpenAI's endpoints."""
    backend = Backend(
        models.ServedModel(service.model, service.started),
        service.reader,
        service.documents,
        service.conversations,
        service.sessions.window,
        service.answers,
        service.settings.max_tokens,
    )
    stores, uploads = service.vector_stores, service.uploads
    return (
        models.router(backend.model),
        chat.router(backend),
        completions.router(backend),
        responses.router(backend, stores, service.forgetting),
        conversation_routes.router(service.conversations, service.forgetting),
        files.router(service.database, uploads, service.file_ingest),
        vector_stores.router(stores),
        vector_store_search.router(stores, service.reader, service.store, service.worker),
        vector_store_files.router(stores, uploads),
        batch_routes.router(stores, service.file_batches),
    )


def _others(service: Service) -> tuple[APIRouter, ...]:
    """The inspector, MCP and metrics."""
    inspected = inspector.Inspected(
        service.model,
        service.reader,
        service.store,
        service.documents,
        service.file_ingest,
        service.settings.body_bytes,
    )
    return (
        inspector.router(inspected),
        mcp_route.router(service.tools, most_bytes=service.settings.most_json),
        metrics_route.router(service.telemetry.registry),
    )
