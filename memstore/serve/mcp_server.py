"""The MCP server: handlers of the SDK's low-level server, for any transport, and the one over stdin
and stdout.

The SDK's MCPServer offers the same tools to every client; here they depend on the API key of a
request.
"""

import signal
from collections.abc import Callable
from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.serve.api_errors import ApiError, as_api_error
from memstore.serve.mcp_tools import TOOLS, Caller, MemoryTools, Tool

CallerOf = Callable[[Any], Caller]
"""The client of a request, by the request's context."""

_ABOUT = (
    "A memory of documents that a language model has read. `search` finds passages, `ask` answers "
    "a question from them in a few words; `ingest` adds a document."
)


def mcp_server(tools: MemoryTools, caller_of: CallerOf) -> Server[Any]:
    """The SDK's server; a transport brings it requests."""

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        may_write = tools.documents.writable(caller_of(ctx).access)
        shown = {name: tool for name, tool in TOOLS.items() if may_write or not tool.writes}
        return types.ListToolsResult(tools=[_described(*item) for item in shown.items()])

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        caller, tool = caller_of(ctx), TOOLS.get(params.name)
        if tool is None:
            return _failed(f"there is no tool {params.name!r}; there are {', '.join(TOOLS)}")
        if tool.writes and tools.store.read_only:
            return _failed("this memory is read-only")
        if tool.writes and not caller.access.write:
            return _failed("this key may only read")
        try:
            given = tool.takes.model_validate(params.arguments or {})
            result = await tool.run(tools, caller, given, ctx.session.report_progress)
        except ValidationError as error:
            return _failed(_invalid(error))
        except (MemstoreError, ApiError, OSError) as error:
            return _failed(as_api_error(error).message)
        text = types.TextContent(type="text", text=_as_text(result))
        return types.CallToolResult(content=[text], structured_content=result)

    return Server(
        "memstore",
        version=__version__,
        instructions=_ABOUT,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _described(name: str, tool: Tool) -> types.Tool:
    return types.Tool(
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
    for key in ("sources", "passages"):
        for one in result.get(key, ()):
            first, end = one["span"]
            lines.append(f"[{one['document']} {first}-{end}] {' '.join(one['text'].split())}")
    for row in result.get("documents", ()):
        lines.append(f"{row['name']} ({row['state']}, {row['tokens']} tokens)")
    return "\n".join(lines) or "nothing was found"


# Over stdin and stdout, for the one client that started this process

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def serve_stdio(tools: MemoryTools, caller: Caller, end: Callable[[int], None]) -> None:
    """Serve one client over stdin and stdout until it closes them.

    end: called with a termination signal, and ends the process: a read of stdin cannot be
    cancelled.
    """
    server = mcp_server(tools, lambda ctx: caller)
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    async def end_at_signal() -> None:
        with anyio.open_signal_receiver(*handled) as arrived:
            async for number in arrived:
                await run_in_threadpool(end, number)

    try:
        async with anyio.create_task_group() as tasks:
            if handled:
                tasks.start_soon(end_at_signal)
            async with stdio_server() as (requests, answers):
                await server.run(requests, answers, server.create_initialization_options())
            tasks.cancel_scope.cancel()
    except* (BrokenPipeError, anyio.BrokenResourceError):
        pass  # the client has closed stdout, and wants no answer
