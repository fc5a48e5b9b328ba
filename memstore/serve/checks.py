"""What every request passes: middleware that checks framing, Host, Origin, API key and body;
FastAPI dependencies that give a route what the key may do; and error responses.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from memstore.errors import MemstoreError
from memstore.serve.api_errors import ApiError, as_api_error, failed, unsupported
from memstore.serve.api_keys import Access, Keys
from memstore.serve.settings import ServeSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

UPLOADS = "/v1/memstore/documents"
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_FORM = "multipart/form-data"
_URLENCODED = "application/x-www-form-urlencoded"


class Checks:
    """ASGI middleware. Sets request.state.access."""

    def __init__(self, app: App, settings: ServeSettings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {*_LOCAL, *settings.hosts, settings.host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            _check_framing(headers)
            self._check_source(headers)
            most = self._check_body(scope, headers)
            scope.setdefault("state", {})["access"] = self._access(scope["path"], headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive, most), send)

    def _check_source(self, headers: Headers) -> None:
        """Refuse a name that is not the server's (DNS rebinding), and a page of another origin: a
        browser would send its form without asking, and without keys it would be answered.
        """
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name.lower() not in self._hosts:
            raise ApiError(421, "host not allowed: add it with --allow-host", code="wrong_host")
        origin = headers.get("origin")
        if origin is None or origin in self._settings.origins:
            return
        if origin.partition("://")[2].lower() != host.lower():
            message = "origin not allowed: add it with --allow-origin"
            raise ApiError(403, message, code="wrong_origin")

    def _check_body(self, scope: Scope, headers: Headers) -> int:
        """The longest body that the request may have. Raises ApiError where it says that it is
        longer, or of a kind that no route takes.
        """
        kind = headers.get("content-type", "").lower()
        if kind.startswith(_URLENCODED):
            raise ApiError(415, f"send JSON, or a file as {_FORM}", code="invalid_type")
        upload = scope["path"] == UPLOADS and kind.startswith(_FORM)
        most = self._settings.body_bytes if upload else self._settings.json_bytes
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise ApiError(400, "Content-Length is no number", code="invalid_value")
        if int(length) > most:
            raise ApiError(413, _too_large(most), code="too_large")
        return most

    def _access(self, path: str, headers: Headers) -> Access:
        """What the request's key may do. Raises ApiError (401)."""
        if not self._keys.known:
            return Access()
        kind, _, key = headers.get("authorization", "").partition(" ")
        access = self._keys.access(key.strip() if kind.lower() == "bearer" else None)
        if access is not None:
            return access
        if path == "/" or path.startswith("/page/"):  # they show nothing of the memory
            return Access(write=False, only=("\0",))
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _bounded(self, receive: Receive, most: int) -> Receive:
        """The same body, which must come in time and not be longer than `most` bytes.

        Raises HTTPException, which FastAPI does not take for a body that it cannot parse.
        """
        received, more = 0, True

        async def bounded() -> Message:
            nonlocal received, more
            try:
                async with asyncio.timeout(self._settings.body_seconds if more else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the rest of the body did not come") from None
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > most:
                raise HTTPException(413, _too_large(most))
            return message

        return bounded


def _check_framing(headers: Headers) -> None:
    """Refuse a body with two lengths: a proxy in front may believe the other one, and take a
    request for a part of a body, or the reverse.
    """
    encodings = headers.getlist("transfer-encoding")
    if not encodings:
        return
    if "content-length" in headers or [one.strip().lower() for one in encodings] != ["chunked"]:
        what = "give either Content-Length or Transfer-Encoding: chunked"
        raise ApiError(400, what, code="invalid_value", headers={"Connection": "close"})


def _too_large(most: int) -> str:
    return f"the body is longer than {most:,} bytes"


def access_of(request: Request) -> Access:
    """What the key of a request may do."""
    access: Access = request.state.access
    return access


def _writing(request: Request) -> Access:
    access = access_of(request)
    if not access.write:
        raise _forbidden("this key may only read")
    return access


def _reading_all(request: Request) -> Access:
    access = access_of(request)
    if access.only:
        raise _forbidden("this key may read some documents only, and this reports on all")
    return access


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code="insufficient_scope")


Reads = Annotated[Access, Depends(access_of)]
"""Of a route that reads."""
Writes = Annotated[Access, Depends(_writing)]
"""Of a route that changes something; 403 for a key that may only read."""
ReadsAll = Annotated[Access, Depends(_reading_all)]
"""Of a route that reports on the whole server; 403 for a key of some documents."""


# Every error of the app becomes OpenAI's error object

_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_type",
    429: "overloaded",
}


def error_response(error: ApiError) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error.body, error.status, error.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers for every kind of error of an app."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error))

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return error_response(failed())  # uvicorn logs it

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code)
        headers = dict(error.headers or {})
        return error_response(
            ApiError(error.status_code, str(error.detail), code=code, headers=headers)
        )

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_of_validation(error))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(MemstoreError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unforeseen)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first wrong value of a request, by the name of its parameter."""
    first = error.errors()[0]
    _, *parts = first["loc"]  # after "body", "query" or "path"
    param, what = ".".join(map(str, parts)), first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {what}", code="invalid_value")
    if first["type"] == "extra_forbidden":
        return unsupported(param)
    message = f"{param or 'the body'}: {what}"
    return ApiError(400, message, code="invalid_value", param=param or None)
