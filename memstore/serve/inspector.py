"""The page of the server, and the routes that describe the model, the memory, the tiers and what
was answered.
"""

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from memstore import __version__
from memstore.serve.api_errors import not_found
from memstore.serve.checks import Reads, ReadsAll
from memstore.serve.service import Service

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# nothing from another host, no inline script or style, and no text that becomes markup
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


def _file(path: Path) -> Response:
    """A file of the page."""
    media_type = f"{_TYPES[path.suffix]}; charset=utf-8"
    return Response(path.read_bytes(), media_type=media_type, headers=HEADERS)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    files = {path.name: path for path in _PAGE.iterdir() if path.suffix in _TYPES}

    @routes.get("/", include_in_schema=False)
    def page() -> Response:
        return _file(files["index.html"])

    @routes.get("/page/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        if name not in files:
            raise not_found("page", name)
        return _file(files[name])

    @routes.get("/v1/memstore")
    def about(access: Reads) -> dict[str, Any]:
        model, figures = service.model, ("documents", "tokens", "file_bytes")
        stats = None if access.only else service.store.stats()  # of all documents
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
