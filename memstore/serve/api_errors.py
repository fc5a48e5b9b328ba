"""Errors of the API: OpenAI's error object, with an HTTP status and a code for every error."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from memstore import errors
from memstore.disk.files import NO_SPACE
from memstore.errors import MemstoreError

_log = logging.getLogger("memstore")
_RETRY = {"Retry-After": "5"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: _RETRY, 503: _RETRY}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    400: "invalid_value",
    403: "insufficient_scope",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    429: "overloaded",
}
# Status, code, and a message that replaces the error's own if that could name the memory's
# directory, or documents that the client may not see. Unknown documents are refused before work
# begins: a document that is missing later was deleted concurrently.
_ANSWERED: dict[type[MemstoreError], tuple[int, str, str | None]] = {
    errors.DocumentNotFound: (409, "document_gone", "a document was just deleted; ask again"),
    errors.DocumentExists: (409, "document_exists", None),
    errors.MemoryLocked: (409, "memory_locked", "the memory is being written; try later"),
    errors.ReadOnlyMemory: (403, "read_only", "the memory cannot be written"),
    errors.StorageFull: (507, "storage_full", "the disk is full; make room on it"),
    errors.BudgetExceeded: (503, "budget_exceeded", None),
    errors.StoreUnavailable: (503, "storage_unavailable", "a part of the memory is unreachable"),
    errors.MemoryNotFound: (503, "storage_unavailable", "the memory is gone; restart the server"),
    errors.CorruptMemory: (500, "memory_damaged", "the memory is damaged; run memstore verify"),
    errors.InvalidInput: (400, "invalid_input", None),
}


class ApiError(Exception):
    """A response with OpenAI's error object; code: default: the status's."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": _TYPES.get(self.status, kind)}
        return {"error": {**error, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body, self.status, _HEADERS.get(self.status))


class Busy(ApiError):
    """The queue is full."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message)


class Stopped(ApiError):
    """The server is stopping."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping; ask again when it is back", code="stopping")


def as_api_error(error: BaseException) -> ApiError:
    """The response to an exception; an unexpected one is logged, and its text withheld."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # FastAPI blames the body; a large one goes to a temporary file
        if error.errno in NO_SPACE:
            error = errors.StorageFull(f"no room for an upload's temporary file: {error}")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        found = error.errors()
        # of text or a list, the error of the list says more: the text's is only that it is a list
        first = next((one for one in found if one["type"] != "string_type"), found[0])
        return of_validation({**first, "loc": first["loc"][1:]})  # after "body", "query" or "path"
    for kind, (status, code, message) in _ANSWERED.items():
        if isinstance(error, kind):
            if status >= 500:
                # its text only: a record that is kept would keep what its traceback holds
                _log.warning("%s: %s", type(error).__name__, str(error))
            return ApiError(status, message or str(error), code=code)
    _log.error("unexpected error", exc_info=error)
    return ApiError(500, "the server failed", code="internal_error")


def of_validation(error: Mapping[str, Any]) -> ApiError:
    """The response to an invalid value, from pydantic's error; names its parameter."""
    param, what = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid" or (not param and error["type"] == "model_attributes_type"):
        return ApiError(400, f"the body is not JSON with Content-Type: application/json: {what}")
    return ApiError(400, f"{param or 'the body'}: {what}", param=param or None)


def install_error_handlers(app: FastAPI, on_error: Callable[[ApiError], None]) -> None:
    """Answer every error of an app with OpenAI's error object. on_error: called with each."""

    async def answered(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        on_error(found)
        response = found.response
        response.headers.update(getattr(error, "headers", None) or {})  # Allow, of status 405
        return response

    for kind in (ApiError, MemstoreError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answered)
