"""POST /v1/completions: what follows a text, as it is."""

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from memstore.serve.answering.answers import Question
from memstore.serve.api_errors import ApiError, unsupported
from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads
from memstore.serve.http.openai.completing import Completing, Shape, complete
from memstore.serve.http.openai.prompts import Backend
from memstore.serve.strict import Neutral, entries

_TOKENS = 16  # by default: OpenAI's default
_SHAPE = Shape(
    prefix="cmpl",
    name="text_completion",
    chunk="text_completion",
    text=lambda text: {"text": text},
    piece=lambda piece: {"text": piece},
    first=None,
    last={"text": ""},
)


class CompletionRequest(Completing):
    """What is to be continued."""

    neutral: ClassVar[Neutral] = {
        **Completing.neutral,
        "logprobs": (None,),
        "echo": (None, False),
        "suffix": (None, ""),
        "best_of": (None, 1),
    }
    prompt: str | Annotated[list[str], entries(least=1)]


def router(backend: Backend) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completion(
        request: Request, asked: CompletionRequest, access: Reads
    ) -> Response | dict[str, Any]:
        backend.model.check(asked.model)
        question = await run_in_threadpool(_question, backend, asked, access)
        return await complete(backend, request, asked, question, _SHAPE)

    return routes


def _question(backend: Backend, asked: CompletionRequest, access: Access) -> Question:
    """What is asked. Raises ApiError."""
    asked.check_number()
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if len(prompts) > 1:
        raise unsupported("prompt", "with several texts is not supported here")
    (prompt,) = prompts
    if not prompt.strip():
        raise ApiError(400, "the prompt is empty", code="invalid_value", param="prompt")
    most = asked.max_tokens or _TOKENS
    sampling = asked.sampling(backend, most, seed=asked.seed, stop=asked.stop, raw=True)
    return asked.question(
        backend, access, prompt, sampling, keep=False, operation="text_completion"
    )
