"""What a client is told when something goes wrong: OpenAI's shape of an error, and the status that
goes with each of this package's errors.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from memstore.errors import (
    BudgetExceeded,
    CorruptMemory,
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryLocked,
    MemoryNotFound,
    MemstoreError,
    ReadOnlyMemory,
    StorageFull,
    StoreUnavailable,
)
from memstore.serve.answering.admission_queue import Busy
from memstore.serve.answering.worker import Stopped

_log = logging.getLogger("memstore")
# Status, code, and what is said in the place of the error's own words, where these name the
# memory's directory, or documents that the asker may not know of. A document that was asked for
# and is not there is told before anything is done: one that is missing later was forgotten
# meanwhile.
_TOLD: dict[type[MemstoreError], tuple[int, str, str | None]] = {
    DocumentNotFound: (409, "document_gone", "a document was forgotten meanwhile; ask again"),
    DocumentExists: (409, "document_exists", None),
    MemoryLocked: (409, "memory_locked", "the memory is being written by another; try again later"),
    ReadOnlyMemory: (403, "read_only", "the memory cannot be written"),
    StorageFull: (507, "storage_full", "there is no room; forget documents, or raise a quota"),
    BudgetExceeded: (503, "budget_exceeded", None),
    StoreUnavailable: (
        503,
        "storage_unavailable",
        "a part of the memory cannot be reached now; ask again later",
    ),
    MemoryNotFound: (503, "storage_unavailable", "the memory is not where it was; ask again later"),
    CorruptMemory: (500, "memory_damaged", "a part of the memory is damaged; have it verified"),
    InvalidInput: (400, "invalid_input", None),
}
_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_type",
    429: "overloaded",
}


class ApiError(Exception):
    """An answer that is an error: {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}
        self.type, self.code, self.param = type, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        said = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, self.headers)


def unsupported(param: str, why: str = "is not supported here") -> ApiError:
    """The error for a parameter that this server does not know what to do with."""
    message = f"{param} {why}; leave it out"
    return ApiError(400, message, code="unsupported_parameter", param=param)


def not_found(what: str, name: str) -> ApiError:
    """The error for something that is not there."""
    return ApiError(404, f"no {what} {name!r}", code="not_found")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error; of one that nobody foresaw, only that there was one. What
    is the server's own fault the log tells whole.
    """
    match error:
        case ApiError():
            return error
        case Busy():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(
                429, str(error), type="rate_limit_error", code="overloaded", headers=headers
            )
        case Stopped():
            return ApiError(
                503,
                "the server is stopping; ask again when it is back",
                type="server_error",
                code="stopping",
                headers={"Retry-After": "5"},
            )
        case MemstoreError():
            for kind, (status, code, said) in _TOLD.items():
                if isinstance(error, kind):
                    kind_of = "invalid_request_error" if status < 500 else "server_error"
                    if status >= 500:
                        _log.warning("%s: %s", type(error).__name__, error)
                    headers = {"Retry-After": "5"} if code == "storage_unavailable" else {}
                    message = said or str(error)
                    return ApiError(status, message, type=kind_of, code=code, headers=headers)
    _log.error("a question failed in a way that nobody foresaw", exc_info=error)
    return _failed()


def _failed() -> ApiError:
    return ApiError(500, "the server failed", type="server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Have every error of the app be answered in that shape."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return _failed().response()  # uvicorn logs it

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code)
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), code=code, headers=headers).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).response()

    for kind in (ApiError, MemstoreError, Busy, Stopped):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, failed)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request, by the name of the parameter."""
    first = error.errors()[0]
    where, *parts = first["loc"]
    place = _place(parts, error.body) if where == "body" else ".".join(map(str, parts))
    if first["type"] == "extra_forbidden" and place:
        return unsupported(place)
    what = first["msg"].removeprefix("Value error, ")
    missing = first["type"] == "json_invalid"
    message = f"the body is no JSON: {what}" if missing else f"{place or 'the body'}: {what}"
    return ApiError(400, message, code="invalid_value", param=place or None)


def _place(parts: Sequence[int | str], body: Any) -> str:
    """Where in a body something is wrong, or missing: without the kinds that were tried there."""
    place: list[str] = []
    for part in parts:
        if isinstance(body, Mapping) and part in body:
            body = body[str(part)]
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif not (isinstance(body, Mapping) and part == parts[-1]):
            continue
        place.append(str(part))
    return ".".join(place)
