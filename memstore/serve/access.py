"""Access control: API keys, checks of every request, and dependencies of routes."""

import asyncio
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memstore.errors import InvalidInput
from memstore.serve.api_errors import ApiError
from memstore.serve.settings import LOOPBACK, ServeSettings, in_url

UPLOADS = "/v1/memstore/documents"
_LEAST = 16  # characters of a key; fewer could be guessed


@dataclass(frozen=True)
class Access:
    """Rights of a client. only: patterns (fnmatch) of documents that it may see; none: all."""

    write: bool = True
    only: tuple[str, ...] = ()

    def sees(self, document: str) -> bool:
        """May it read (with `write` also change) a document of this name?"""
        return not self.only or any(fnmatchcase(document, pattern) for pattern in self.only)


Keys = Mapping[str, Access]
"""Rights by key; empty if the server needs no keys."""


def read_keys(file: Path) -> Keys:
    """Lines `KEY [read|write] [only=PATTERN ...]`; # begins a comment. Raises InvalidInput."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"cannot read {file}: {why}; name a file of API keys") from None
    keys = dict[str, Access]()
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words and words[0] in keys:
            raise InvalidInput(f"{file} holds a key twice; remove one of them")
        if words:
            keys[words[0]] = _scope(words, f"{file}:{number}")
    if not keys:
        raise InvalidInput(f"{file} holds no key; write one key on each line")
    return keys


def granted(keys: Keys, key: str) -> Access | None:
    """The rights of a key; None for an unknown one. Compares every key, in constant time."""
    found = None
    for known, access in keys.items():
        if hmac.compare_digest(key.encode(), known.encode()):
            found = access
    return found


def _scope(words: Sequence[str], line: str) -> Access:
    key, *scopes = words
    if len(key) < _LEAST or not key.isascii():  # clients encode other letters differently
        raise InvalidInput(f"{line}: a key needs at least {_LEAST} characters, all of ASCII")
    write, only = False, []
    for scope in scopes:
        if scope.startswith("only="):
            only.append(scope.removeprefix("only="))
        elif scope in ("read", "write"):
            write = scope == "write"
        else:
            raise InvalidInput(f"{line}: {scope!r} is not a scope; use read, write or only=PATTERN")
    return Access(write, tuple(only))


# Every request


class Checks:
    """ASGI middleware. Sets request.state.access."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {in_url(host) for host in (*LOOPBACK, *settings.hosts, settings.host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        try:
            self._check_source(headers)
            access = self._access(path, headers)
            scope.setdefault("state", {})["access"] = access
            uploads = path == UPLOADS and scope["method"] == "POST"
            if uploads:
                check_writing(access)  # here, since FastAPI parses the body before the route runs
            most = self._settings.body_bytes if uploads else self._settings.json_bytes
            if int(headers.get("content-length", "0")) > most:  # digits only, as h11 checks
                raise ApiError(413, _too_large(most))
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive, most), send)

    def _check_source(self, headers: Headers) -> None:
        """Refuse a foreign host name (DNS rebinding) and a page of another origin: a browser sends
        its forms without a preflight request, and a server without keys would answer.
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

    def _access(self, path: str, headers: Headers) -> Access:
        """The rights of the request's key. Raises ApiError (401)."""
        if not self._keys:
            return Access()
        kind, _, key = headers.get("authorization", "").partition(" ")
        access = granted(self._keys, key.strip()) if kind.lower() == "bearer" else None
        if access is not None:
            return access
        if path == "/" or path.startswith("/page/"):  # static files, without data of the memory
            return Access(write=False, only=("\0",))
        message = "a valid API key is needed: Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")

    def _bounded(self, receive: Receive, most: int) -> Receive:
        """Receive a body with a timeout and a limit of `most` bytes.

        Raises HTTPException, which FastAPI does not report as a body that it cannot parse.
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


def _too_large(most: int) -> str:
    return f"the body is longer than {most:,} bytes"


def access_of(request: Request) -> Access:
    """The rights of a request's key."""
    access: Access = request.state.access
    return access


def check_writing(access: Access) -> None:
    """Raises ApiError (403) for a read-only key."""
    if not access.write:
        raise ApiError(403, "this key is read-only")


def _reading_all(request: Request) -> Access:
    access = access_of(request)
    if access.only:
        raise ApiError(403, "this key may read some documents only, and this reports on all")
    return access


Rights = Annotated[Access, Depends(access_of)]
"""For a route: the rights of the request's key."""
ReadsAll = Annotated[Access, Depends(_reading_all)]
"""For a route that reports on the whole server; 403 for a key of some documents."""
