"""POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Header, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from memstore.serve.answering.answers import Question
from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads
from memstore.serve.http.openai.completing import Completing, Shape, complete
from memstore.serve.http.openai.prompts import Backend, Content, Tokens, as_turns
from memstore.serve.state.conversations import ConversationId
from memstore.serve.strict import Neutral, Strict, entries

_SHAPE = Shape(
    prefix="chatcmpl",
    name="chat.completion",
    chunk="chat.completion.chunk",
    text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda piece: {"delta": {"content": piece}},
    first={"delta": {"role": "assistant", "content": ""}},
    last={"delta": {}},
)


class Message(Strict):
    """A message of a chat."""

    neutral: ClassVar[Neutral] = {
        "refusal": (None,),
        "annotations": (None, []),
        "audio": (None,),
        "tool_calls": (None, []),
        "function_call": (None,),
        "memstore": (None,),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    name: str | None = None


class ChatRequest(Completing):
    """What is asked."""

    neutral: ClassVar[Neutral] = {
        **Completing.neutral,
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "tools": (None, []),
        "functions": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
    }
    messages: Annotated[list[Message], entries(least=1)]
    max_completion_tokens: Tokens | None = None


def router(backend: Backend) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(
        request: Request,
        asked: ChatRequest,
        access: Reads,
        memstore_conversation: Annotated[ConversationId | None, Header()] = None,
    ) -> Response | dict[str, Any]:
        backend.model.check(asked.model)
        question = await run_in_threadpool(_question, backend, asked, access, memstore_conversation)
        return await complete(backend, request, asked, question, _SHAPE)

    return routes


def _question(
    backend: Backend, asked: ChatRequest, access: Access, conversation: str | None
) -> Question:
    """What is asked. Raises ApiError."""
    asked.check_number()
    messages = [(message.role, message.content) for message in asked.messages]
    turns, text = as_turns(messages, templated=backend.reader.templated)
    known = None
    if conversation is not None:
        known = backend.conversations.get_or_create(access.name, conversation)
        if not turns:  # who sends no history goes on with what is stored
            turns = backend.conversations.turns(known)
    most = asked.max_completion_tokens or asked.max_tokens
    sampling = asked.sampling(backend, most, seed=asked.seed, stop=asked.stop)
    return asked.question(backend, access, text, sampling, turns, conversation=known)
