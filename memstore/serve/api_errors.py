"""Errors as an API answers them: OpenAI's error object, with the HTTP status and code of each of
this package's errors.
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
# Status, code, and the message in the place of the error's own words, where these name the
# memory's directory, or documents that the asker may not know of. A document that was asked for
# and is not there is told before anything is done: one that is missing later was forgotten
# meanwhile.
_ANSWERED: dict[type[MemstoreError], tuple[int, str, str | None]] = {
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
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}


class Busy(ApiError):
    """Too much is waiting already. retry_after: whole seconds until there will be room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(
            429,
            message,
            type="rate_limit_error",
            code="overloaded",
            headers={"Retry-After": str(retry_after)},
        )
        self.retry_after = retry_after


class Stopped(ApiError):
    """The server ends: nothing new is begun."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "the server is stopping; ask again when it is back",
            type="server_error",
            code="stopping",
            headers={"Retry-After": "5"},
        )


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
                headers={"Retry-After": "5"} if code == "storage_unavailable" else {},
            )
    _log.error("a question failed in a way that nobody foresaw", exc_info=error)
    return failed()


def failed() -> ApiError:
    """The error that tells nothing but that there was one."""
    return ApiError(500, "the server failed", type="server_error", code="internal_error")
