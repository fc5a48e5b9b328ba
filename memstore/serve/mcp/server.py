"""The MCP server: the tools of mcp_tools, and documents as resources; over HTTP (/mcp) here, over
stdio in mcp_stdio.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote

import mcp_types as types
from fastapi import APIRouter, Request
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from sse_starlette.sse import AppStatus
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.model.document_text import document_text
from memstore.serve.answering.admission_queue import Busy
from memstore.serve.answering.worker import Stopped
from memstore.serve.api_errors import ApiError, as_api_error
from memstore.serve.api_keys import owner, reading
from memstore.serve.mcp.tools import TOOLS, Asker
from memstore.serve.service import Service

AskerOf = Callable[[Any], Asker]
"""Who sent a request, by its context."""

_SCHEME = "memstore://documents/"
_URI = re.compile(re.escape(_SCHEME) + r"([^/?#]+)(?:/([0-9]{1,15})-([0-9]{1,15}))?")
_PAGE = 200  # resources listed at once
_LONGEST = 1_000_000  # characters of a resource
_TOLD = (MemstoreError, ApiError, Busy, Stopped, OSError)
_ABOUT = (
    "A memory of documents that a language model has read. `search` finds passages, `ask` answers "
    "a question from them in a few words; `ingest` adds a document."
)


def mcp_server(service: Service, asker_of: AskerOf) -> Server[Any]:
    """What answers MCP's requests; a transport brings them."""

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        may_write = service.may_write(asker_of(ctx).access)
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=tool.description,
                    input_schema=tool.takes.model_json_schema(),
                    annotations=types.ToolAnnotations(
                        read_only_hint=not tool.writes,
                        destructive_hint=tool.destroys,
                        idempotent_hint=True,
                        open_world_hint=False,
                    ),
                )
                for name, tool in TOOLS.items()
                if may_write or not tool.writes
            ]
        )

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        asker = asker_of(ctx)
        tool = TOOLS.get(params.name)
        if tool is None:
            return _failed(f"there is no tool {params.name!r}; there are {', '.join(TOOLS)}")
        if tool.writes and service.store.read_only:
            return _failed("this memory is only read")
        if tool.writes and not asker.access.write:
            return _failed("this key may only read")

        async def progress(done: float, total: float) -> None:
            await ctx.session.report_progress(done, total)

        try:
            given = tool.takes.model_validate(params.arguments or {})
            told = await tool.run(service, asker, given, progress)
        except ValidationError as error:
            return _failed(_invalid(error))
        except _TOLD as error:
            return _failed(_said(error))
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=_as_text(told))], structured_content=told
        )

    async def list_resources(
        ctx: Any, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        after = _cursor(params)
        names = await run_in_threadpool(service.documents, asker_of(ctx).access)
        page = names[after : after + _PAGE]
        return types.ListResourcesResult(
            resources=[
                types.Resource(name=name, uri=_uri(name), mime_type="text/plain") for name in page
            ],
            next_cursor=str(after + _PAGE) if after + _PAGE < len(names) else None,
        )

    async def list_templates(ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="a part of a document",
            uri_template=f"{_SCHEME}{{name}}/{{first}}-{{end}}",
            description="Its characters `first` up to `end`, as the spans of sources count them.",
            mime_type="text/plain",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read(ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        asker = asker_of(ctx)
        try:
            text = await run_in_threadpool(_read, service, asker, params.uri)
        except _TOLD as error:
            raise MCPError(types.INVALID_PARAMS, _said(error)) from None
        found = types.TextResourceContents(uri=params.uri, mime_type="text/plain", text=text)
        return types.ReadResourceResult(contents=[found])

    return Server(
        "memstore",
        version=__version__,
        instructions=_ABOUT,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
    )


def router(service: Service) -> APIRouter:
    """The route /mcp: one request, one answer, no session; the key of each request says what it may
    do. No file of the server is read for a client.
    """
    AppStatus.disable_automatic_graceful_drain()  # or a signal cuts off what is being answered
    server = mcp_server(service, lambda ctx: _asker(ctx.request))
    manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def alive(app: object) -> AsyncIterator[None]:
        nonlocal manager
        manager = StreamableHTTPSessionManager(
            server, stateless=True, max_request_body_size=service.settings.most_json
        )
        async with manager.run():
            yield

    class Endpoint:
        """An ASGI app, and so no function: Starlette would call that with a request."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            assert manager is not None
            await manager.handle_request(scope, receive, send)

    routes = APIRouter(lifespan=alive)
    endpoint: Any = Endpoint()
    routes.add_route("/mcp", endpoint, methods=["POST"], include_in_schema=False)
    return routes


def _asker(request: Request) -> Asker:
    return Asker(reading(request), owner(request))


def _read(service: Service, asker: Asker, uri: str) -> str:
    """The text of a resource. Raises ApiError for what is none, or is too long."""
    found = _URI.fullmatch(uri)
    name = unquote(found[1]) if found else ""
    if found is None or not service.visible(asker.access, name):
        raise ApiError(404, f"there is no document {uri!r}")
    first, end = (0, None) if found[2] is None else (int(found[2]), int(found[3]))
    reader, store = service.reader, service.store
    (document,) = store.ready([name])
    parts, at = list[str](), 0
    for text in document_text(reader.tokenizer, store, document):
        if end is not None and at >= end:
            break
        parts.append(text[max(0, first - at) : None if end is None else max(0, end - at)])
        at += len(text)
        if sum(map(len, parts)) > _LONGEST:
            raise ApiError(
                413,
                f"{name!r} is longer than {_LONGEST:,} characters; read a part of it: "
                f"{_uri(name)}/0-{_LONGEST}",
            )
    return "".join(parts)


def _uri(name: str) -> str:
    return _SCHEME + quote(name, safe="")


def _cursor(params: types.PaginatedRequestParams | None) -> int:
    cursor = params.cursor if params is not None and params.cursor else "0"
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
        raise MCPError(types.INVALID_PARAMS, "the cursor is none that this server gave")
    return int(cursor)


def _failed(message: str) -> types.CallToolResult:
    line = " ".join(message.split())
    text = types.TextContent(type="text", text=f"error: {line}")
    return types.CallToolResult(content=[text], is_error=True)


def _said(error: BaseException) -> str:
    return as_api_error(error).message


def _invalid(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "the arguments"
    return f"{place}: {first['msg']}"


def _as_text(told: dict[str, Any]) -> str:
    """What a model reads that is given no structured content."""
    lines = [str(value) for key, value in told.items() if not isinstance(value, list | bool)]
    if told.get("answered") is False:
        lines = ["(not in the memory)"]
    if told.get("absent"):
        lines.append(f"(could not be read, and left out: {', '.join(told['absent'])})")
    for key in ("sources", "passages"):
        for one in told.get(key, ()):
            first, end = one["span"]
            lines.append(f"[{one['document']} {first}-{end}] {' '.join(one['text'].split())}")
    for row in told.get("documents", ()):
        lines.append(f"{row['name']} ({row['state']}, {row['tokens']} tokens)")
    return "\n".join(lines) or "nothing was found"
