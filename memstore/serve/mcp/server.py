"""The MCP server: handlers of the SDK's low-level server, whatever transport brings the requests.

The SDK's MCPServer offers everybody every tool, and resources that were registered beforehand; here
both depend on the API key of a request.
"""

from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.serve.api_errors import ApiError, as_api_error
from memstore.serve.mcp.resources import TEMPLATE, Resources
from memstore.serve.mcp.tools import TOOLS, Asker, MemoryTools

AskerOf = Callable[[Any], Asker]
"""Who sent a request, by its context."""

_ANSWERED = (MemstoreError, ApiError, OSError)
_ABOUT = (
    "A memory of documents that a language model has read. `search` finds passages, `ask` answers "
    "a question from them in a few words; `ingest` adds a document."
)


def mcp_server(tools: MemoryTools, asker_of: AskerOf) -> Server[Any]:
    """The SDK's server; a transport brings it requests."""
    answers = _Answers(tools, asker_of)
    return Server(
        "memstore",
        version=__version__,
        instructions=_ABOUT,
        on_list_tools=answers.list_tools,
        on_call_tool=answers.call_tool,
        on_list_resources=answers.list_resources,
        on_list_resource_templates=answers.list_templates,
        on_read_resource=answers.read_resource,
    )


class _Answers:
    """The answer to every kind of request."""

    def __init__(self, tools: MemoryTools, asker_of: AskerOf) -> None:
        self._tools, self._asker_of = tools, asker_of
        self._resources = Resources(tools.store, tools.reader.tokenizer, tools.documents)

    async def list_tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        may_write = self._tools.documents.writable(self._asker_of(ctx).access)
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
        asker, tool = self._asker_of(ctx), TOOLS.get(params.name)
        if tool is None:
            return _failed(f"there is no tool {params.name!r}; there are {', '.join(TOOLS)}")
        if tool.writes and self._tools.store.read_only:
            return _failed("this memory is only read")
        if tool.writes and not asker.access.write:
            return _failed("this key may only read")
        try:
            given = tool.takes.model_validate(params.arguments or {})
            result = await tool.run(self._tools, asker, given, ctx.session.report_progress)
        except ValidationError as error:
            return _failed(_invalid(error))
        except _ANSWERED as error:
            return _failed(as_api_error(error).message)
        text = types.TextContent(type="text", text=_as_text(result))
        return types.CallToolResult(content=[text], structured_content=result)

    async def list_resources(
        self, ctx: Any, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        access = self._asker_of(ctx).access
        return await run_in_threadpool(self._resources.page, access, params)

    async def list_templates(self, ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[TEMPLATE])

    async def read_resource(
        self, ctx: Any, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        access = self._asker_of(ctx).access
        try:
            text = await run_in_threadpool(self._resources.read, access, params.uri)
        except _ANSWERED as error:
            raise MCPError(types.INVALID_PARAMS, as_api_error(error).message) from None
        content = types.TextResourceContents(uri=params.uri, mime_type="text/plain", text=text)
        return types.ReadResourceResult(contents=[content])


def _failed(message: str) -> types.CallToolResult:
    line = " ".join(message.split())
    text = types.TextContent(type="text", text=f"error: {line}")
    return types.CallToolResult(content=[text], is_error=True)


def _invalid(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    argument = ".".join(map(str, first["loc"])) or "the arguments"
    return f"{argument}: {first['msg']}"


def _as_text(result: dict[str, Any]) -> str:
    """What a model reads that is given no structured content."""
    lines = [str(value) for key, value in result.items() if not isinstance(value, list | bool)]
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
