"""The MCP server over stdin and stdout, for the one client that started this process."""

import signal
from collections.abc import Callable

import anyio
from mcp.server.stdio import stdio_server
from starlette.concurrency import run_in_threadpool

from memstore.serve.mcp.server import mcp_server
from memstore.serve.mcp.tools import Caller, MemoryTools

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
