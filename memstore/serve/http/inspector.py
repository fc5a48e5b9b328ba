"""The inspector: a page that shows what was read for an answer, and the routes that tell it of the
model and the tiers.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from memstore import __version__
from memstore.serve.api_errors import not_found
from memstore.serve.http.checks import Reads, ReadsAll
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


@dataclass(frozen=True)
class _File:
    """A file of the page."""

    data: bytes
    type: str
    tag: str

    @classmethod
    def of(cls, path: Path) -> "_File":
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        return cls(data, f"{_TYPES[path.suffix]}; charset=utf-8", tag)

    def response(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        headers = {**HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=self.type, headers=headers)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    files = {path.name: _File.of(path) for path in _PAGE.iterdir() if path.suffix in _TYPES}

    @routes.get("/", include_in_schema=False)
    def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @routes.get("/page/{name}", include_in_schema=False)
    def part(request: Request, name: str) -> Response:
        if name not in files:
            raise not_found("page", name)
        return files[name].response(request)

    @routes.get("/v1/memstore")
    def about(access: Reads) -> dict[str, Any]:
        model = service.model
        return {
            "object": "memstore",
            "version": __version__,
            "model": service.name,
            "reader": "landmarks" if model.keeps is None else "choosing",
            "layers": list(model.shape.memory_layers),
            "heads": model.shape.num_heads,
            "kv_heads": model.shape.num_kv_heads,
            "block_size": model.shape.block_size,
            "write": service.documents.writable(access),
            "tiers": not access.only,
            "upload_bytes": service.settings.body_bytes,
        }

    @routes.get("/v1/memstore/tiers")
    def tiers(access: ReadsAll) -> dict[str, Any]:
        now = round(time.time(), 3)
        return {"object": "memstore.tiers", "time": now, "tiers": service.store.tier_stats()}

    return routes
