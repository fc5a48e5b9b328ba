"""The MCP server of a memory, its tools, and the transport over stdin and stdout."""

import asyncio
import signal
from collections.abc import Callable
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool

from memstore import __version__
from memstore.errors import MemstoreError
from memstore.model.source_text import Text
from memstore.serve.access import Access
from memstore.serve.answers import Question
from memstore.serve.api_errors import ApiError, as_api_error, of_validation
from memstore.serve.requests import Phrase
from memstore.serve.service import Service
from memstore.store.committed import Mode

_ABOUT = (
    "A memory of documents that a language model has read. `search` finds passages, `ask` answers "
    "a question from them in a few words; `ingest` adds a document."
)
_SECONDS_BETWEEN = 0.5  # least seconds between progress reports of an ingest

Names = Annotated[list[str] | None, Field(description="Look in these documents only.")]
Content = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Name = Annotated[str, Field(description="The document's name.")]


class _Server(MCPServer[Any]):
    """Reports an invalid call in one line."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context | None = None
    ) -> Any:
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                raise ToolError(of_validation(cause.errors()[0]).message) from None
            if isinstance(cause, MemstoreError | ApiError | OSError):
                raise ToolError(as_api_error(cause).message) from cause
            raise


def mcp_server(
    service: Service, access_of: Callable[[Any], Access], *, write: bool
) -> MCPServer[Any]:
    """The SDK's server, for any transport. access_of: the rights of the client of a request, which
    is None over stdin. write: offer tools that change the memory.
    """
    server = _Server("memstore", version=__version__, instructions=_ABOUT, log_level="WARNING")
    held = service.documents

    def access(ctx: Context) -> Access:
        return access_of(ctx.request_context.request)

    async def ask(
        question: Phrase,
        ctx: Context,
        documents: Names = None,
        max_new_tokens: Annotated[int | None, Field(ge=1, description="Longest answer.")] = None,
    ) -> dict[str, Any]:
        """Ask the memory a question. It answers in the words of its documents, and says which
        passages it read, the most telling first.
        """
        held.check_length(question, "question")
        most = max_new_tokens or service.model.answering.max_new_tokens
        caller = access(ctx)
        asked = Question(
            question,
            {"max_new_tokens": min(most, service.settings.max_tokens)},
            await run_in_threadpool(held.chosen, caller, documents),
            may_read=caller.sees,
        )
        outcome = await service.ask_whole(asked)
        report = {name: outcome.memstore[name] for name in ("answered", "sources")}
        return {"answer": outcome.text, **report}

    async def search(
        phrase: Phrase,
        ctx: Context,
        documents: Names = None,
        top_k: Annotated[int, Field(ge=1, le=100, description="How many passages.")] = 5,
    ) -> dict[str, Any]:
        """Find the passages of the memory that are most like a phrase, word by word, best first;
        their weights compare them, and are no shares of words. answered: false where none of them
        seems to answer the phrase as a question.
        """
        found = await held.search(access(ctx), phrase, documents, top_k)
        return {"answered": found.answered, "passages": [source.citation for source in found]}

    async def documents(ctx: Context) -> dict[str, Any]:
        """List the documents of the memory, and those that are being ingested."""
        return {"documents": await run_in_threadpool(held.listed, access(ctx))}

    async def ingest(name: Name, text: Content, ctx: Context, mode: Mode = "new") -> dict[str, Any]:
        """Read a text into the memory, once; it can be asked and searched from then on. mode: what
        to do where the memory has a document of that name with other text.
        """
        caller = access(ctx)
        upload = await run_in_threadpool(held.add, caller, Text(text, name), mode)
        try:
            pause = 0.01
            while upload.active:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SECONDS_BETWEEN)
                if (at := upload.job.latest) is not None:
                    await ctx.report_progress(at.characters, at.total_characters)
        finally:
            service.worker.cancel(upload.job)  # ingested chunks stay
        if upload.error is not None:
            raise upload.error
        if upload.job.result is None:
            raise ApiError(503, "the ingest was stopped; ingest again to resume it")
        return await run_in_threadpool(held.row, caller, name)

    async def forget(name: Name, ctx: Context) -> dict[str, Any]:
        """Delete a document from the memory; no later answer reads it."""
        await run_in_threadpool(held.delete, access(ctx), name)
        return {"forgotten": name}

    tools: list[Callable[..., Any]] = [ask, search, documents]
    if write:
        tools += [ingest, forget]
    for run in tools:
        hints = ToolAnnotations(
            read_only_hint=run not in (ingest, forget),
            destructive_hint=run is forget,
            idempotent_hint=True,
            open_world_hint=False,
        )
        server.add_tool(run, annotations=hints)
    return server


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def serve_stdio(server: MCPServer[Any], end: Callable[[int], None]) -> None:
    """Serve one client over stdin and stdout until it closes them.

    end: called with a termination signal; must end the process, since a read of stdin cannot be
    cancelled.
    """
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    async def end_at_signal() -> None:
        with anyio.open_signal_receiver(*handled) as arrived:
            async for number in arrived:
                await run_in_threadpool(end, number)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_at_signal)
            await server.run_stdio_async()
            tasks.cancel_scope.cancel()
    except* (BrokenPipeError, anyio.BrokenResourceError):
        pass  # the client has closed stdout
