"""Routes under /v1/memstore for documents: upload, list, delete, search, and their text."""

from typing import Annotated, Any, Literal, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StringConstraints, ValidationError
from starlette.datastructures import FormData, UploadFile

from memstore.model.source_text import Text
from memstore.serve.api_errors import ApiError
from memstore.serve.checks import UPLOADS, Reads, Writes
from memstore.serve.documents import converted
from memstore.serve.requests import Strict, entries
from memstore.serve.service import Service

S = TypeVar("S", bound=Strict)
_CONVERTED_AT_ONCE = 2  # uploads; a conversion takes a process and much memory
_BLOCKS = 64  # of a text that are sent at once


class NewDocument(Strict):
    """A document as JSON."""

    name: str
    text: Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
    mode: Literal["new", "replace"] = "new"


class NewFile(Strict):
    """The fields of a form beside its file. name: of the document; by default the file's."""

    name: str | None = None
    mode: Literal["new", "replace"] = "new"


class Search(Strict):
    """What to search for."""

    query: Annotated[str, StringConstraints(max_length=8192, pattern=r"\S")]
    documents: Annotated[list[str], entries()] | None = None
    top_k: Annotated[int, Field(ge=1, le=100)] = 5


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    documents = service.documents
    limiter = CapacityLimiter(_CONVERTED_AT_ONCE)

    @routes.post(UPLOADS, status_code=202, openapi_extra=_upload_schema())
    async def upload(request: Request, access: Writes) -> dict[str, Any]:
        if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            async with request.form(max_files=1, max_fields=4) as form:
                file, given = _form(form)
                content = await file.read()
            text = await run_sync(
                converted, content, file.filename or "", given.name, limiter=limiter
            )
            mode = given.mode
        else:
            document = _validated(NewDocument, await _json(request))
            text, mode = Text(document.text, document.name), document.mode
        await run_in_threadpool(documents.add, access, text, mode)
        return await run_in_threadpool(documents.row, access, text.name)

    @routes.get(UPLOADS)
    def listed(access: Reads) -> dict[str, Any]:
        return {"object": "list", "data": documents.listed(access)}

    @routes.delete(f"{UPLOADS}/{{name:path}}")
    def delete(name: str, access: Writes) -> dict[str, Any]:
        documents.delete(access, name)
        return {"object": "memstore.document.deleted", "name": name, "deleted": True}

    @routes.post("/v1/memstore/search")
    async def search(given: Search, access: Reads) -> dict[str, Any]:
        found = await documents.search(access, given.query, given.documents, given.top_k)
        data = [source.citation for source in found]
        return {"object": "list", "data": data, "answered": found.answered}

    @routes.get("/v1/memstore/text")
    def text(
        access: Reads,
        document: str,
        first: Annotated[int, Query(ge=0, lt=2**48)] = 0,
        end: Annotated[int | None, Query(ge=0, lt=2**48)] = None,
    ) -> dict[str, Any]:
        last = first + _BLOCKS if end is None else min(end, first + _BLOCKS)
        blocks = documents.blocks(access, document, first, last)
        row = documents.row(access, document)
        return {"object": "memstore.text", "document": row, "data": blocks}

    return routes


def _form(form: FormData) -> tuple[UploadFile, NewFile]:
    """The file of a form, and its other fields. Raises ApiError, RequestValidationError."""
    fields = dict(form)
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        raise ApiError(400, "the form needs a file", code="invalid_value", param="file")
    return file, _validated(NewFile, fields)


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        message = f"the body is neither JSON nor a form: {error}"
        raise ApiError(400, message, code="invalid_value") from None


def _validated(kind: type[S], given: Any) -> S:
    """As FastAPI validates a body, which it cannot do for a route that takes JSON or a form."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(errors, body=given) from None


def _upload_schema() -> dict[str, Any]:
    """The body of an upload, for /openapi.json."""
    form = NewFile.model_json_schema()
    form["properties"]["file"] = {"type": "string", "format": "binary"}
    kinds = {"multipart/form-data": form | {"required": ["file"]}}
    kinds["application/json"] = NewDocument.model_json_schema()
    return {"requestBody": {"content": {kind: {"schema": one} for kind, one in kinds.items()}}}
