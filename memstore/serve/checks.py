"""What every request passes before a route sees it: its Host, the page it comes from, its key, and
its size.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from memstore.serve.errors import ApiError
from memstore.serve.keys import Access
from memstore.serve.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_BODIES = 8  # as long ones as may be, that are held at once
_SHORT = 1024  # a body of such a part of the longest is short
_OPEN = ("/page", "/health")  # beside "/": they show nothing of the memory


class Checks:
    """ASGI middleware. Sets request.state.access (keys.Access)."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service
        settings = service.settings
        self._hosts = {*_LOCAL, *settings.hosts, settings.host}
        self._held = 0  # bytes of the bodies of requests that are being answered, or wait for it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["access"] = self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        with self._bounded(receive) as bounded:
            await self._app(scope, bounded, send)

    def _check(self, scope: Scope) -> Access:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name.lower() not in self._hosts:
            raise ApiError(421, "this server is not called so; see --allow-host", code="wrong_host")
        self._check_origin(headers.get("origin"), host)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise ApiError(400, "Content-Length is no number", code="invalid_value")
        if int(length) > self._service.settings.body_bytes:
            raise ApiError(413, self._too_large, code="too_large")
        keys, path = self._service.keys, scope["path"]
        if not keys.known:
            return Access()
        kind, _, key = headers.get("authorization", "").partition(" ")
        access = keys.access(key.strip() if kind.lower() == "bearer" else None)
        if access is not None:
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
        if origin is None or origin in self._service.settings.origins:
            return
        if origin.partition("://")[2].lower() != host.lower():
            raise ApiError(
                403, "pages of other hosts may not ask; see --allow-origin", code="wrong_origin"
            )

    @property
    def _too_large(self) -> str:
        return f"the body is longer than {self._service.settings.body_bytes:,} bytes"

    @contextmanager
    def _bounded(self, receive: Receive) -> Iterator[Receive]:
        """A body that comes in time, is not too long, and for which there is room beside those of
        other requests; a short one always has it.

        Raises HTTPException, which FastAPI does not take for a body that it cannot parse.
        """
        settings, got, more = self._service.settings, 0, True
        most, short = _BODIES * settings.body_bytes, settings.body_bytes // _SHORT

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal got, more
            try:
                async with asyncio.timeout(settings.body_seconds if more else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the rest of the body did not come") from None
            size = len(message.get("body", b""))
            got, self._held = got + size, self._held + size
            more = message.get("more_body", False)
            if got > settings.body_bytes:
                raise HTTPException(413, self._too_large)
            if size and got > short and self._held > most:
                later = {"Retry-After": "5"}
                raise HTTPException(429, "long bodies of others are being worked on", later)
            return message

        try:
            yield bounded
        finally:
            self._held -= got
