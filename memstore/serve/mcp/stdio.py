"""The MCP server over stdin and stdout, for the one client that started this process."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.server.stdio import stdio_server
from starlette.concurrency import run_in_threadpool

from memstore.serve.mcp.server import mcp_server
from memstore.serve.mcp.tools import Caller, MemoryTools

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Streams = tuple[Any, Any]
"""Where a server reads requests, and where it writes answers."""

_LAST_ANSWERS = 10.0  # seconds for requests that were sent before stdin was closed


async def serve_stdio(tools: MemoryTools, caller: Caller, end: Callable[[int], None]) -> None:
    """Serve one client over stdin and stdout until it closes them. Requests sent before that are
    answered, within 10 seconds, so that they may come from a pipe.

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
            async with (
                stdio_server() as (stdin, stdout),
                _between(stdin, stdout) as (requests, answers),
            ):
                await server.run(requests, answers, server.create_initialization_options())
            tasks.cancel_scope.cancel()
    except* (BrokenPipeError, anyio.BrokenResourceError):
        pass  # the client has closed stdout, and wants no answer


@asynccontextmanager
async def _between(stdin: Any, stdout: Any) -> AsyncIterator[_Streams]:
    """The streams of a server, connected to those of its client. A server drops unfinished work
    when its requests end; so these end only when every request is answered.
    """
    to_server, requests = anyio.create_memory_object_stream[Any](0)
    to_client, answers = anyio.create_memory_object_stream[Any](0)
    unanswered = set[Any]()
    answered = anyio.Condition()

    async def forward_requests() -> None:
        async with to_server:
            async for sent in stdin:
                if isinstance(sent, Exception):  # a line that is no message
                    pass
                elif isinstance(sent.message, types.JSONRPCRequest):
                    unanswered.add(sent.message.id)
                elif getattr(sent.message, "method", "") == "notifications/cancelled":
                    cancelled = (sent.message.params or {}).get("requestId")
                    if isinstance(cancelled, str | int):  # else it names no request
                        unanswered.discard(cancelled)
                await to_server.send(sent)
            with anyio.move_on_after(_LAST_ANSWERS):
                async with answered:
                    while unanswered:
                        await answered.wait()

    async def forward_answers() -> None:
        async with stdout:
            async for answer in answers:
                await stdout.send(answer)
                async with answered:
                    unanswered.discard(getattr(answer.message, "id", None))
                    answered.notify_all()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(forward_requests)
        tasks.start_soon(forward_answers)
        async with to_client:
            yield requests, to_client
