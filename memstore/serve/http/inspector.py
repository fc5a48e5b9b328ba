"""The inspector: a page that shows what was read for an answer, and the routes under /v1/memstore
that it needs and OpenAI's API does not have.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import Response

from memstore import __version__
from memstore.disk.format.document import Document, is_of_prompt
from memstore.model.model_api import ModelAPI
from memstore.serve.answering.trace_report import passage
from memstore.serve.api_errors import not_found
from memstore.serve.api_keys import Access
from memstore.serve.background.file_ingest import FileIngest
from memstore.serve.document_access import DocumentAccess
from memstore.serve.http.authorization import Reads, ReadsAll, Writes
from memstore.serve.http.tier_history import TierHistory
from memstore.store.memory_store import MemoryStore

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_BLOCKS = 64  # of a document that are told at once
# nothing of another host, no inline script or style, and no text that becomes markup
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
        return cls(
            data,
            f"{_TYPES[path.suffix]}; charset=utf-8",
            f'"{hashlib.sha256(data).hexdigest()[:16]}"',
        )

    def response(self, request: Request) -> Response:
        """It, or that the browser has it already."""
        headers = {**HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=self.type, headers=headers)


@dataclass(frozen=True)
class Inspected:
    """What the inspector shows. model: its name; upload_bytes: of the largest upload."""

    model: str
    reader: ModelAPI
    store: MemoryStore
    documents: DocumentAccess
    ingest: FileIngest
    upload_bytes: int

    def about(self, access: Access) -> dict[str, Any]:
        """The model, and what an API key may do."""
        shape = self.reader.shape
        return {
            "object": "memstore",
            "version": __version__,
            "model": self.model,
            "reader": "landmarks" if self.reader.keeps is None else "choosing",
            "layers": list(shape.memory_layers),
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "block_size": shape.block_size,
            "write": self.documents.writable(access),
            "tiers": not access.only,
            "upload_bytes": self.upload_bytes,
        }

    def text(self, name: str, first: int, end: int | None) -> dict[str, Any]:
        """Blocks first .. end - 1 of a document."""
        row, most = self.store.document(name), first + _BLOCKS
        last = most if end is None else min(end, most)
        blocks = passage(self.reader, self.store, name, first, last)
        return {"object": "memstore.text", "document": document_object(row), "data": blocks}


def router(inspected: Inspected) -> APIRouter:
    """The routes."""
    store, known = inspected.store, inspected.documents
    history = TierHistory(store)

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        async with history.kept():
            yield

    routes = APIRouter(lifespan=alive)
    _add_page(routes)

    @routes.get("/v1/memstore")
    def served(access: Reads) -> dict[str, Any]:
        return inspected.about(access)

    @routes.get("/v1/memstore/documents")
    def documents(access: Reads) -> dict[str, Any]:
        seen = [
            document_object(document)
            for document in store.documents()
            if access.sees(document.name) and not is_of_prompt(document.name)
        ]
        return {"object": "list", "data": seen}

    @routes.get("/v1/memstore/text")
    def text(
        access: Reads,
        document: str,
        first: Annotated[int, Query(ge=0, lt=2**48)] = 0,
        end: Annotated[int | None, Query(ge=0, lt=2**48)] = None,
    ) -> dict[str, Any]:
        known.check(access, document)
        return inspected.text(document, first, end)

    @routes.delete("/v1/memstore/documents/{name:path}")
    def forget(name: str, access: Writes) -> dict[str, Any]:
        known.check(access, name)
        inspected.ingest.forget(name)
        return {"object": "memstore.document.deleted", "name": name, "deleted": True}

    @routes.get("/v1/memstore/tiers")
    def tiers(
        access: ReadsAll, since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> dict[str, Any]:
        return {"object": "list", "every": history.every, "data": history.since(since)}

    return routes


def _add_page(routes: APIRouter) -> None:
    files = {path.name: _File.of(path) for path in _PAGE.iterdir() if path.suffix in _TYPES}

    @routes.get("/", include_in_schema=False)
    def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @routes.get("/page/{name}", include_in_schema=False)
    def part(request: Request, name: str) -> Response:
        if name not in files:
            raise not_found("page", name)
        return files[name].response(request)


def document_object(document: Document) -> dict[str, Any]:
    """A document as JSON."""
    return {
        "object": "memstore.document",
        "name": document.name,
        "state": document.state,
        "tokens": document.tokens,
        "blocks": document.blocks,
        "bytes": document.bytes,
        "created": int(document.created),
    }
