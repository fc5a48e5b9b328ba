"""The MCP server: handlers of the SDK's low-level server, for any transport, and the documents of
the memory as resources.

The SDK's MCPServer offers the same tools and resources to every client; here both depend on the API
key of a request.
"""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.serve.api_errors import ApiError, as_api_error
from memstore.serve.api_keys import Access
from memstore.serve.mcp.tools import TOOLS, Caller, MemoryTools

CallerOf = Callable[[Any], Caller]
"""The client of a request, by the request's context."""

_ANSWERED = (MemstoreError, ApiError, OSError)
_ABOUT = (
    "A memory of documents that a language model has read. `search` finds passages, `ask` answers "
    "a question from them in a few words; `ingest` adds a document."
)
_SCHEME = "memstore://documents/"
_URI = re.compile(re.escape(_SCHEME) + r"([^/?#]+)(?:/([0-9]{1,15})-([0-9]{1,15}))?")
_PAGE = 200  # resources listed at once
_LONGEST = 1_000_000  # characters of a resource
_TEMPLATE = types.ResourceTemplate(
    name="a part of a document",
    uri_template=f"{_SCHEME}{{name}}/{{first}}-{{end}}",
    description="Its characters `first` up to `end`, as the spans of sources count them.",
    mime_type="text/plain",
)


def mcp_server(tools: MemoryTools, caller_of: CallerOf) -> Server[Any]:
    """The SDK's server; a transport brings it requests."""
    handlers = _Handlers(tools, caller_of)
    return Server(
        "memstore",
        version=__version__,
        instructions=_ABOUT,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
    )


class _Handlers:
    """Answers every kind of request."""

    def __init__(self, tools: MemoryTools, caller_of: CallerOf) -> None:
        self._tools, self._documents, self._caller_of = tools, tools.documents, caller_of

    async def list_tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        may_write = self._documents.writable(self._caller_of(ctx).access)
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

    async def call_tool(
        self, ctx: Any, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        caller, tool = self._caller_of(ctx), TOOLS.get(params.name)
        if tool is None:
            return _failed(f"there is no tool {params.name!r}; there are {', '.join(TOOLS)}")
        if tool.writes and self._tools.store.read_only:
            return _failed("this memory is read-only")
        if tool.writes and not caller.access.write:
            return _failed("this key may only read")
        try:
            given = tool.takes.model_validate(params.arguments or {})
            result = await tool.run(self._tools, caller, given, ctx.session.report_progress)
        except ValidationError as error:
            return _failed(_invalid(error))
        except _ANSWERED as error:
            return _failed(as_api_error(error).message)
        text = types.TextContent(type="text", text=_as_text(result))
        return types.CallToolResult(content=[text], structured_content=result)

    async def list_resources(
        self, ctx: Any, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        cursor = params.cursor if params is not None and params.cursor else "0"
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
            raise MCPError(types.INVALID_PARAMS, "this server gave no such cursor")
        names = await run_in_threadpool(self._documents.readable, self._caller_of(ctx).access)
        end = int(cursor) + _PAGE
        resources = [
            types.Resource(name=name, uri=_uri(name), mime_type="text/plain")
            for name in names[int(cursor) : end]
        ]
        more = str(end) if end < len(names) else None
        return types.ListResourcesResult(resources=resources, next_cursor=more)

    async def list_templates(self, ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[_TEMPLATE])

    async def read_resource(
        self, ctx: Any, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        access = self._caller_of(ctx).access
        try:
            text = await run_in_threadpool(self._resource, access, params.uri)
        except _ANSWERED as error:
            raise MCPError(types.INVALID_PARAMS, as_api_error(error).message) from None
        content = types.TextResourceContents(uri=params.uri, mime_type="text/plain", text=text)
        return types.ReadResourceResult(contents=[content])

    def _resource(self, access: Access, uri: str) -> str:
        """The text of a document, or the part of it that the URI names. Raises ApiError for an
        unknown URI, and for a text that is too long.
        """
        match = _URI.fullmatch(uri)
        name = unquote(match[1]) if match else ""
        if match is None or not self._documents.visible(access, name):
            raise ApiError(404, f"there is no document {uri!r}")
        first, end = (0, None) if match[2] is None else (int(match[2]), int(match[3]))
        parts, at = list[str](), 0
        for text in self._documents.text(access, name):
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


def _failed(message: str) -> types.CallToolResult:
    line = " ".join(message.split())
    text = types.TextContent(type="text", text=f"error: {line}")
    return types.CallToolResult(content=[text], is_error=True)


def _invalid(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    argument = ".".join(map(str, first["loc"])) or "the arguments"
    return f"{argument}: {first['msg']}"


def _as_text(result: dict[str, Any]) -> str:
    """The result as text, for a model that is given no structured content."""
    lines = [str(one) for one in result.values() if not isinstance(one, list | bool | None)]
    if result.get("answered") is False and "passages" in result:
        lines.append("(none of these passages seems to answer it as a question)")
    if result.get("absent"):
        lines.append(f"(could not be read, and left out: {', '.join(result['absent'])})")
    for key in ("sources", "passages"):
        for one in result.get(key, ()):
            first, end = one["span"]
            lines.append(f"[{one['document']} {first}-{end}] {' '.join(one['text'].split())}")
    for row in result.get("documents", ()):
        lines.append(f"{row['name']} ({row['state']}, {row['tokens']} tokens)")
    return "\n".join(lines) or "nothing was found"
