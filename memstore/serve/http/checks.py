"""Middleware that checks every request before a route sees it: Host, Origin, API key and size."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access, Keys
from memstore.serve.http.bodies import wrong_with
from memstore.serve.http.connections import most_connections
from memstore.serve.http.error_responses import error_response
from memstore.serve.settings import ServeSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_BODIES = 8  # as long ones as may be, that are held at once
_SHORT = 1024  # a body of such a part of the longest is short
_FORM = "application/x-www-form-urlencoded"
_OPEN = ("/page", "/health")  # beside "/": they show nothing of the memory


class Checks:
    """ASGI middleware. Sets request.state.access (keys.Access)."""

    def __init__(self, app: App, settings: ServeSettings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {*_LOCAL, *settings.hosts, settings.host}
        # bytes of the bodies of a key's requests that are being answered, or wait for it
        self._held: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # requests of a key
        # of keys that slow clients have: the others find places, too
        self._most_running = most_connections() // (1 if keys.count == 1 else 2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            access = scope.setdefault("state", {})["access"] = self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        self._running[access.name] += 1
        try:
            with self._bounded(scope, receive) as bounded:
                await self._app(scope, bounded, send)
        finally:
            self._running[access.name] -= 1

    def _check(self, scope: Scope) -> Access:
        headers = Headers(scope=scope)
        _check_framing(headers)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name.lower() not in self._hosts:
            raise ApiError(421, "this server is not called so; see --allow-host", code="wrong_host")
        self._check_origin(headers.get("origin"), host)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise ApiError(400, "Content-Length is no number", code="invalid_value")
        if headers.get("content-type", "").lower().startswith(_FORM):
            raise ApiError(415, "send JSON, or a file as multipart/form-data", code="invalid_type")
        if int(length) > (most := self._most(scope)):
            raise ApiError(413, _too_large(most), code="too_large")
        keys, path = self._keys, scope["path"]
        if not keys.known:
            return Access()
        kind, _, key = headers.get("authorization", "").partition(" ")
        access = keys.access(key.strip() if kind.lower() == "bearer" else None)
        if access is not None:
            if self._running[access.name] >= self._most_running:
                later = {"Retry-After": "5"}
                what = "too many requests of this key are open"
                raise ApiError(429, what, code="overloaded", headers=later)
            return access
        if path == "/" or path.startswith(_OPEN):
            return Access("nobody", write=False, only=("\0",))
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_origin(self, origin: str | None, host: str) -> None:
        """Refuse a request that a page of somebody else has a browser send: it needs no permission
        to upload a form, and without keys it would be heard.
        """
        if origin is None or origin in self._settings.origins:
            return
        if origin.partition("://")[2].lower() != host.lower():
            raise ApiError(
                403, "pages of other hosts may not ask; see --allow-origin", code="wrong_origin"
            )

    def _most(self, scope: Scope) -> int:
        settings = self._settings
        return settings.body_bytes if _is_upload(scope) else settings.most_json

    @contextmanager
    def _bounded(self, scope: Scope, receive: Receive) -> Iterator[Receive]:
        """A body that comes in time, is not too long, and for which there is room beside those of
        the key's other requests; a short one always has it. One that is no upload comes whole, and
        is looked at before it is parsed.

        Raises HTTPException, which FastAPI does not take for a body that it cannot parse.
        """
        settings, got, more = self._settings, 0, True
        longest, whose = self._most(scope), scope["state"]["access"].name
        together = max(2, _BODIES // self._keys.count) * settings.body_bytes
        short = settings.body_bytes // _SHORT

        async def part() -> MutableMapping[str, Any]:
            nonlocal got, more
            try:
                async with asyncio.timeout(settings.body_seconds if more else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the rest of the body did not come") from None
            size = len(message.get("body", b""))
            got, self._held[whose] = got + size, self._held[whose] + size
            more = message.get("more_body", False)
            if got > longest:
                raise HTTPException(413, _too_large(longest))
            if size and got > short and self._held[whose] > together:
                later = {"Retry-After": "5"}
                raise HTTPException(429, "long bodies of this key are being worked on", later)
            return message

        async def whole() -> MutableMapping[str, Any]:
            if not more:
                return await part()
            body = bytearray()
            while more:
                message = await part()
                if message["type"] != "http.request":
                    return message
                body += message.get("body", b"")
            if wrong := wrong_with(body):
                raise HTTPException(400, wrong)
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        try:
            yield part if _is_upload(scope) else whole
        finally:
            self._held[whose] -= got


def _check_framing(headers: Headers) -> None:
    """Refuse a body that has two lengths: a proxy in front may believe the other one, and
    take what this server takes for a request to be a body, or for a body to be a request.
    """
    encodings = headers.getlist("transfer-encoding")
    if not encodings:
        return
    if "content-length" in headers or [one.strip().lower() for one in encodings] != ["chunked"]:
        what = "give either Content-Length or Transfer-Encoding: chunked"
        raise ApiError(400, what, code="invalid_value", headers={"Connection": "close"})


def _is_upload(scope: Scope) -> bool:
    return bool(scope["path"] == "/v1/files") and scope.get("method") == "POST"


def _too_large(most: int) -> str:
    return f"the body is longer than {most:,} bytes"
