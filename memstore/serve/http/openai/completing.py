"""Completions, of a chat or of a text: the parameters of a request, and the answer in the shape of
either endpoint, whole or streamed.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from memstore.serve.answering.answers import Outcome, Question
from memstore.serve.api_errors import unsupported
from memstore.serve.http.authorization import owner
from memstore.serve.http.openai.prompts import Backend, Generating, Stop, StreamOptions, Tokens
from memstore.serve.http.sse import DONE, event, streamed, whole
from memstore.serve.strict import Neutral


class Completing(Generating):
    """The parameters of both."""

    neutral: ClassVar[Neutral] = {
        "frequency_penalty": (None, 0, 0.0),
        "presence_penalty": (None, 0, 0.0),
        "logit_bias": (None, {}),
        "stream_options": (None,),
        "n": (None,),
        "memstore": (None,),
    }
    max_tokens: Tokens | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    n: int = 1
    stream_options: StreamOptions | None = None

    def check_number(self) -> None:
        """Raises ApiError for more answers than one."""
        if self.n != 1:
            raise unsupported("n", "other than 1 is not supported here")


@dataclass(frozen=True)
class Shape:
    """How an endpoint tells an answer. prefix: of ids; text, piece: the choice that has a whole
    text, or the next piece of one; first, last: the choices around the pieces of a stream.
    """

    prefix: str
    name: str
    chunk: str
    text: Callable[[str], dict[str, Any]]
    piece: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None
    last: dict[str, Any]


async def complete(
    backend: Backend, request: Request, asked: Completing, question: Question, shape: Shape
) -> Response | dict[str, Any]:
    """Answer a question in the shape of an endpoint."""
    pieces, outcome = backend.answers.begin(owner(request), question)
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": backend.model.name,
    }
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        head["object"] = shape.chunk
        return await streamed(request, _events(head, pieces, outcome, shape, usage), pieces)
    choice = shape.text(await whole(request, pieces))
    return {
        **head,
        "object": shape.name,
        "choices": [_choice(choice, outcome.finish_reason)],
        "usage": outcome.usage,
        "memstore": outcome.memstore,
    }


def _choice(text: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **text, "finish_reason": reason, "logprobs": None}


async def _events(
    head: dict[str, Any], pieces: AsyncIterator[str], outcome: Outcome, shape: Shape, usage: bool
) -> AsyncIterator[str]:
    def chunk(*choices: dict[str, Any], **more: Any) -> str:
        extra = {"usage": None} | more if usage else more
        return event({**head, "choices": list(choices), **extra})

    first = shape.first
    async for piece in pieces:
        if first is not None:
            yield chunk(_choice(first))
            first = None
        if piece:
            yield chunk(_choice(shape.piece(piece)))
    yield chunk(_choice(shape.last, outcome.finish_reason), memstore=outcome.memstore)
    if usage:
        yield chunk(usage=outcome.usage)
    yield DONE
