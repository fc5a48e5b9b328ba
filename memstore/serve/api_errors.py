"""Errors of the API: OpenAI's error object, with an HTTP status and code for each of this package's
errors.
"""

import logging
from typing import Any

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

_log = logging.getLogger("memstore")
_RETRY_SECONDS = "5"
# Status, code, and a message instead of the error's own where that could name the memory's
# directory, or documents that the client may not see. Unknown documents are refused before any
# work begins: one that is missing later was deleted in between.
_ANSWERED: dict[type[MemstoreError], tuple[int, str, str | None]] = {
    DocumentNotFound: (409, "document_gone", "a document was deleted in between; ask again"),
    DocumentExists: (409, "document_exists", None),
    MemoryLocked: (
        409,
        "memory_locked",
        "the memory is being written by another process; try later",
    ),
    ReadOnlyMemory: (403, "read_only", "the memory cannot be written"),
    StorageFull: (507, "storage_full", "the disk is full; make room on it"),
    BudgetExceeded: (503, "budget_exceeded", None),
    StoreUnavailable: (
        503,
        "storage_unavailable",
        "a part of the memory is unreachable; ask again later",
    ),
    MemoryNotFound: (503, "storage_unavailable", "the memory is unreachable; ask again later"),
    CorruptMemory: (500, "memory_damaged", "a part of the memory is damaged; run memstore verify"),
    InvalidInput: (400, "invalid_input", None),
}


class ApiError(Exception):
    """An error response: {"error": {"message", "type", "param", "code"}}."""

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
        """The JSON body."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}


class Busy(ApiError):
    """Too much is waiting already."""

    def __init__(self, message: str) -> None:
        super().__init__(
            429,
            message,
            type="rate_limit_error",
            code="overloaded",
            headers={"Retry-After": _RETRY_SECONDS},
        )


class Stopped(ApiError):
    """The server is stopping."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "the server is stopping; ask again when it is back",
            type="server_error",
            code="stopping",
            headers={"Retry-After": _RETRY_SECONDS},
        )


def unsupported(param: str, why: str = "is not supported here") -> ApiError:
    """The error for a parameter that this server does not support."""
    message = f"{param} {why}; leave it out"
    return ApiError(400, message, code="unsupported_parameter", param=param)


def not_found(what: str, name: str) -> ApiError:
    """The error for something that does not exist, or that the client may not see."""
    return ApiError(404, f"no {what} {name!r}", code="not_found")


def as_api_error(error: BaseException) -> ApiError:
    """The error response for an exception; one that was not expected says nothing else. Errors of
    the server are logged in full.
    """
    if isinstance(error, ApiError):
        return error
    for kind, (status, code, message) in _ANSWERED.items():
        if isinstance(error, kind):
            if status >= 500:
                _log.warning("%s: %s", type(error).__name__, error)
            return ApiError(
                status,
                message or str(error),
                type="invalid_request_error" if status < 500 else "server_error",
                code=code,
                headers={"Retry-After": _RETRY_SECONDS} if code == "storage_unavailable" else {},
            )
    _log.error("unexpected error", exc_info=error)
    return failed()


def failed() -> ApiError:
    """The response to an unexpected error."""
    return ApiError(500, "the server failed", type="server_error", code="internal_error")
