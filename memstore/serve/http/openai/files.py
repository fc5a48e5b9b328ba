"""/v1/files: documents are uploaded, listed, given back and deleted."""

from sqlite3 import Row
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from memstore.model.document_ingest import IngestProgress
from memstore.serve.api_errors import unsupported
from memstore.serve.background.file_ingest import FileIngest
from memstore.serve.http.authorization import Reads, Writes
from memstore.serve.http.paging import Paging, page
from memstore.serve.state.database import Database
from memstore.serve.state.uploads import PURPOSES, Uploads

_STATUS = {"queued": "uploaded", "reading": "uploaded", "ready": "processed", "failed": "error"}
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class FilePaging(Paging):
    """As Paging. purpose: only files with it."""

    limit: int = Field(default=10_000, ge=1, le=10_000)
    purpose: str | None = None


def router(database: Database, uploads: Uploads, ingest: FileIngest) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    def shown(row: Row) -> dict[str, Any]:
        return file_object(row, ingest.progress(row))

    @routes.post("/v1/files")
    async def upload(
        request: Request,
        access: Writes,
        file: Annotated[UploadFile, File()],
        purpose: Annotated[str, Form()],
        anchor: Annotated[Literal["created_at"] | None, Form(alias=_ANCHOR)] = None,
        seconds: Annotated[int | None, Form(alias=_SECONDS, ge=3600, le=2_592_000)] = None,
    ) -> dict[str, Any]:
        fields = {"file", "purpose", _ANCHOR, _SECONDS}
        for name in (await request.form()).keys() - fields:
            raise unsupported(name)
        if purpose not in PURPOSES:
            raise unsupported("purpose", f"must be {' or '.join(PURPOSES)}, not {purpose!r}")
        row = await run_in_threadpool(
            uploads.add, access, file.filename or "", file.file, purpose, seconds
        )
        ingest.begin()
        return shown(row)

    @routes.get("/v1/files")
    def files(access: Reads, paging: Annotated[FilePaging, Query()]) -> dict[str, Any]:
        select, values = "SELECT * FROM files WHERE state != 'leaving'", list[str]()
        if paging.purpose is not None:
            select, values = f"{select} AND purpose = ?", [paging.purpose]
        keep = (lambda row: access.sees(row["document"])) if access.only else None
        return page(database, select, values, paging, shown, keep=keep)

    @routes.get("/v1/files/{file_id}")
    def retrieve(file_id: str, access: Reads) -> dict[str, Any]:
        return shown(uploads.row(file_id, access))

    @routes.get("/v1/files/{file_id}/content", response_model=None)
    def content(file_id: str, access: Reads) -> StreamingResponse:
        row = uploads.row(file_id, access)
        pieces, size = uploads.content(row), row["bytes"]
        if row["backfilled"]:  # what cannot be read is an answer of its own
            whole = b"".join(pieces)
            pieces, size = iter([whole]), len(whole)
        headers = {
            "Content-Length": str(size),
            "Content-Disposition": "attachment",  # a browser never shows it as a page of ours
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(pieces, 200, headers, "application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    def delete(file_id: str, access: Writes) -> dict[str, Any]:
        ingest.delete(uploads.row(file_id, access))
        return {"id": file_id, "object": "file", "deleted": True}

    return routes


def file_object(row: Row, read: IngestProgress | None) -> dict[str, Any]:
    """OpenAI's object of a file; `memstore`: its document, and how far that is read."""
    state = row["state"]
    document = {
        "document": row["document"],
        "state": state,
        "progress": 1.0 if state == "ready" else 0.0,
        "tokens": row["tokens"],
        "seconds_left": None,
    }
    if state == "reading" and read is not None:
        document |= {
            "progress": round(read.characters / max(1, read.total_characters), 4),
            "tokens": read.tokens,
            "seconds_left": round(read.seconds_left, 1),
        }
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "expires_at": row["expires_at"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": _STATUS[state],
        "status_details": row["error"],
        "memstore": document,
    }
