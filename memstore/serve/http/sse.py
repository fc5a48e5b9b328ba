"""Server-sent events: an answer is streamed, or sent whole, and stops when its client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse

from memstore.serve.api_errors import ApiError, as_api_error

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


async def whole(request: Request, pieces: AsyncGenerator[str, None]) -> str:
    """All pieces together. When the client leaves, they are stopped and ApiError 499 is raised."""

    async def gather() -> str:
        async with aclosing(pieces) as held:
            return "".join([piece async for piece in held])

    return await _unless_gone(request, gather())


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves it is cancelled, and ApiError 499 raised."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    made, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ApiError(499, "the client went away", type="server_error", code="cancelled")
        return made.result()
    finally:
        for task in (made, gone):
            task.cancel()
        await asyncio.gather(made, gone, return_exceptions=True)


def event(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def streamed(
    request: Request, events: AsyncIterator[str], pieces: AsyncGenerator[str, None]
) -> StreamingResponse:
    """A response of events made from an answer's pieces. It begins with the first event: an error
    before it is an ordinary error response, and a client that leaves before it leaves the queue. A
    later error is an event.
    """

    async def begun() -> str | None:
        return await anext(events, None)

    try:
        first = await _unless_gone(request, begun())
    except BaseException:
        await pieces.aclose()
        raise

    async def body() -> AsyncIterator[str]:
        async with aclosing(pieces):  # ends the answer when the client leaves
            if first is not None:
                yield first
            try:
                async for one in events:
                    yield one
            except Exception as error:
                yield event(as_api_error(error).body)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)
