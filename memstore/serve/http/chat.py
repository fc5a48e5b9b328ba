"""GET /v1/models and POST /v1/chat/completions, as OpenAI's API has them."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from memstore.serve.answering.answers import Outcome
from memstore.serve.api_errors import ApiError
from memstore.serve.http.chat_request import ChatRequest
from memstore.serve.http.checks import Reads
from memstore.serve.http.sse import DONE, event, streamed, whole
from memstore.serve.service import Service


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
        request: Request, given: ChatRequest, access: Reads
    ) -> Response | dict[str, Any]:
        check_model(given.model)
        question = await run_in_threadpool(given.question, service, access)
        pieces, outcome = service.answers.begin(question)
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.name,
        }
        if given.stream:
            usage = given.stream_options.include_usage
            return await streamed(request, _events(head, pieces, outcome, usage), pieces)
        text = await whole(request, pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
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
        return event({**head, "object": "chat.completion.chunk", "choices": [*choices], **extra})

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
    yield DONE
