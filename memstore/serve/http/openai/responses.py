"""POST /v1/responses, and the stored ones: answers in conversations, with file_search."""

import json
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from memstore.serve.answering.answers import Question, begin
from memstore.serve.api_errors import ApiError, not_found, unsupported
from memstore.serve.api_keys import Access, Reads, owner
from memstore.serve.http.openai import file_search
from memstore.serve.http.openai.file_search import Attached, FileSearchTool
from memstore.serve.http.openai.filters import Metadata
from memstore.serve.http.openai.models import check_model
from memstore.serve.http.openai.prompts import Content, Generating, Tokens, as_turns
from memstore.serve.http.openai.response_body import ResponseBody
from memstore.serve.http.paging import Paging, page_of
from memstore.serve.http.sse import streamed, whole
from memstore.serve.service import Service
from memstore.serve.state.conversations import ConversationId
from memstore.serve.strict import Neutral, Strict, entries


class Item(Strict):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None


class SearchItem(Strict):
    """What an earlier response searched: nothing is done with it."""

    type: Literal["file_search_call"]
    id: str | None = None
    status: str | None = None
    queries: Annotated[list[str], entries()] | None = None
    results: Annotated[list[dict[str, Any]], entries()] | None = None


class Named(Strict):
    """A conversation."""

    id: ConversationId


class ResponseRequest(Generating):
    """What is asked."""

    neutral: ClassVar[Neutral] = {
        "background": (None, False),
        "parallel_tool_calls": (None, True, False),
        "reasoning": (None, {}),
        "service_tier": (None, "auto", "default"),
        "stream_options": (None, {}, {"include_obfuscation": False}),
        "text": (None, {}, {"format": {"type": "text"}}),
        "tool_choice": (None, "auto"),
        "top_logprobs": (None, 0),
        "truncation": (None, "auto", "disabled"),
        "max_tool_calls": (None,),
        "prompt": (None,),
        "memstore": (None,),
    }
    input: str | Annotated[list[Item | SearchItem], entries(least=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: ConversationId | Named | None = None
    max_output_tokens: Tokens | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    tools: Annotated[list[FileSearchTool], entries(16)] | None = None
    include: Annotated[list[Literal["file_search_call.results"]], entries(16)] | None = None


class Retrieving(BaseModel):
    """What is asked of a stored response: nothing but that."""

    model_config = ConfigDict(extra="forbid")


@dataclass
class Asked:
    """A request that was understood."""

    request: ResponseRequest
    question: Question
    attached: Attached | None
    items: list[dict[str, Any]]

    @property
    def stored(self) -> bool:
        """Shall the response be kept?"""
        return self.request.store is not False


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=None)
    async def respond(
        request: Request, given: ResponseRequest, access: Reads
    ) -> Response | dict[str, Any]:
        check_model(service, given.model)
        asked = await run_in_threadpool(_asked, service, given, access)
        pieces, outcome = begin(service, owner(request), asked.question)
        answer = ResponseBody(service, asked)
        if given.stream:
            return await streamed(request, answer.events(pieces, outcome), pieces)
        text = await whole(request, pieces)
        return await run_in_threadpool(answer.finished, text, outcome)

    @routes.get("/v1/responses/{name}")
    def retrieve(name: str, access: Reads, given: Annotated[Retrieving, Query()]) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(_row(service, access, name)["body"])
        return body

    @routes.get("/v1/responses/{name}/input_items")
    def input_items(name: str, access: Reads, paging: Annotated[Paging, Query()]) -> dict[str, Any]:
        return page_of(json.loads(_row(service, access, name)["input"]), paging)

    @routes.delete("/v1/responses/{name}")
    def delete(name: str, access: Reads) -> dict[str, Any]:
        service.forget_response(access.name, name)
        return {"id": name, "object": "response.deleted", "deleted": True}

    return routes


def _row(service: Service, access: Access, name: str) -> Any:
    row = service.database.row(
        "SELECT * FROM responses WHERE id = ? AND owner = ?", (name, access.name)
    )
    if row is None:
        raise not_found("response", name)
    return row


def _asked(service: Service, given: ResponseRequest, access: Access) -> Asked:
    """What a request means. Raises ApiError."""
    items = (
        [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    )
    messages = [(item.role, item.content) for item in items if isinstance(item, Item)]
    told = [
        {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": role,
            "status": "completed",
            "content": _parts(role, content),
        }
        for role, content in messages
    ]
    if given.instructions is not None:
        at = max((i for i, (role, _) in enumerate(messages) if role == "assistant"), default=-1)
        messages.insert(at + 1, ("system", given.instructions))
    turns, text = as_turns(messages, templated=service.reader.templated, param="input")
    which = given.conversation
    name = which.id if isinstance(which, Named) else which
    if name is not None and given.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id and conversation exclude each other",
            code="invalid_value",
            param="previous_response_id",
        )
    conversations, conversation = service.conversations, None
    if name is not None:
        conversation = conversations.get(access.name, name)
        turns = service.tree.turns(conversation.head) + turns
    elif given.previous_response_id is not None:
        turns = service.tree.turns(_row(service, access, given.previous_response_id)["key"]) + turns
    if given.tools is not None and len(given.tools) > 1:
        raise unsupported("tools", "with more than one file_search is not supported here")
    attached, documents = None, None
    if given.tools:
        attached = file_search.attach(service, access, given.tools[0])
        documents, named = attached.documents, given.memstore.documents
        if named is not None:  # of them those that are named
            named = service.documents(access, named)
            documents = [document for document in documents if document in named]
    question = given.question(
        service,
        access,
        text,
        given.sampling(service, given.max_output_tokens),
        turns,
        documents=documents,
        conversation=conversation,
        keep=given.store is not False or name is not None,
        max_sources=max(given.memstore.max_sources, attached.most if attached else 0),
    )
    return Asked(given, question, attached, told)


def _parts(role: str, content: Content) -> list[dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    more: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
    return [{"type": kind, "text": text, **more} for text in texts]
