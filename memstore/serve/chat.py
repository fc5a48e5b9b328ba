"""GET /v1/models and POST /v1/chat/completions as in OpenAI's API, whole or streamed."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from memstore.serve.access import Rights
from memstore.serve.answers import Outcome
from memstore.serve.api_errors import ApiError, as_api_error
from memstore.serve.chat_request import ChatRequest
from memstore.serve.disconnect import unless_gone
from memstore.serve.service import Service

_DONE = "data: [DONE]\n\n"


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    described = {"id": service.name, "object": "model", "created": int(time.time())}
    described["owned_by"] = "memstore"

    def check_model(name: str) -> None:
        if name not in (service.name, "memstore"):
            message = f"no model {name!r}; this server has {service.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    @routes.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @routes.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        check_model(name)
        return described

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(
        request: Request, given: ChatRequest, access: Rights
    ) -> Response | dict[str, Any]:
        check_model(given.model)
        question = await run_in_threadpool(given.question, service, access)
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.name,
        }
        if given.stream:
            pieces, outcome = service.ask(question)
            usage = given.stream_options.include_usage
            return await _streamed(request, _events(head, pieces, outcome, usage), pieces)
        outcome = await unless_gone(request, service.ask_whole(question))
        message = {"role": "assistant", "content": outcome.text, "refusal": None}
        return {
            **head,
            "object": "chat.completion",
            "choices": [_choice({"message": message}, outcome.finish_reason)],
            "usage": outcome.usage,
            "memstore": outcome.memstore,
        }

    return routes


def _choice(content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": reason, "logprobs": None}


async def _events(
    head: dict[str, Any], pieces: AsyncIterator[str], outcome: Outcome, usage: bool
) -> AsyncIterator[str]:
    """The events of a streamed answer."""

    def chunk(*choices: dict[str, Any], **more: Any) -> str:
        extra = {"usage": None} | more if usage else more
        return _event({**head, "object": "chat.completion.chunk", "choices": [*choices], **extra})

    begun = False
    async for piece in pieces:
        if not begun:
            yield chunk(_choice({"delta": {"role": "assistant", "content": ""}}))
            begun = True
        if piece:
            yield chunk(_choice({"delta": {"content": piece}}))
    yield chunk(_choice({"delta": {}}, outcome.finish_reason), memstore=outcome.memstore)
    if usage:
        yield chunk(usage=outcome.usage)
    yield _DONE


def _event(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _streamed(
    request: Request, events: AsyncIterator[str], pieces: AsyncGenerator[str, None]
) -> StreamingResponse:
    """A response of server-sent events from an answer's pieces. It begins with the first event: an
    earlier error is an ordinary error response, and a client that disconnects earlier leaves the
    queue. A later error is an event.
    """

    async def begun() -> str:
        return await anext(events)

    try:
        first = await unless_gone(request, begun())
    except BaseException:
        await pieces.aclose()
        raise

    async def body() -> AsyncIterator[str]:
        async with aclosing(pieces):  # ends the answer if the client disconnects
            yield first
            try:
                async for one in events:
                    yield one
            except Exception as error:
                yield _event(as_api_error(error).body)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)
