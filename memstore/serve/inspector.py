"""The server's page, and routes that describe the model, the memory and the tiers."""

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from memstore import __version__
from memstore.serve.access import ReadsAll, Rights
from memstore.serve.service import Service

_PAGE = Path(__file__).parent / "page"
# nothing from other hosts, no inline scripts or styles, and no text as markup
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Page(StaticFiles):
    """The files of the page."""

    def __init__(self) -> None:
        super().__init__(directory=_PAGE)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=HEADERS)

    @routes.get("/v1/memstore")
    def about(access: Rights) -> dict[str, Any]:
        model, figures = service.model, ("documents", "tokens", "file_bytes")
        stats = None if access.only else service.store.stats()  # covers all documents
        return {
            "object": "memstore",
            "version": __version__,
            "model": service.name,
            "reader": "landmarks" if model.keeps is None else "choosing",
            "stored": None if stats is None else {name: stats[name] for name in figures},
            "write": service.documents.writable(access),
            "tiers": not access.only,
            "upload_bytes": service.settings.body_bytes,
        }

    @routes.get("/v1/memstore/tiers")
    def tiers(access: ReadsAll) -> dict[str, Any]:
        now = round(time.time(), 3)
        return {"object": "memstore.tiers", "time": now, "tiers": service.store.tier_stats()}

    @routes.get("/metrics")
    def metrics(access: ReadsAll) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
