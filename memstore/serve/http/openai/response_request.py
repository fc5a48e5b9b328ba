"""Requests of /v1/responses: their parameters, and the question that they ask."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from memstore.serve.answering.answers import Question
from memstore.serve.api_errors import ApiError, unsupported
from memstore.serve.api_keys import Access
from memstore.serve.http.openai import file_search
from memstore.serve.http.openai.file_search import Attached, FileSearchTool
from memstore.serve.http.openai.filters import Metadata
from memstore.serve.http.openai.prompts import Backend, Content, Generating, Tokens, as_turns
from memstore.serve.state.conversations import Conversation, ConversationId
from memstore.serve.state.turns import Turn
from memstore.serve.state.vector_tables import VectorStores
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


def understand(
    backend: Backend, vector_stores: VectorStores, given: ResponseRequest, access: Access
) -> Asked:
    """What a request means. Raises ApiError."""
    items = (
        [Item(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    )
    messages = [(item.role, item.content) for item in items if isinstance(item, Item)]
    stored = [_message(role, content) for role, content in messages]
    if given.instructions is not None:
        at = max((i for i, (role, _) in enumerate(messages) if role == "assistant"), default=-1)
        messages.insert(at + 1, ("system", given.instructions))
    turns, text = as_turns(messages, templated=backend.reader.templated, param="input")
    conversation, before = _before(backend, given, access)
    attached = _attached(backend, vector_stores, given, access)
    documents = None if attached is None else attached.documents
    if documents is not None and given.memstore.documents is not None:  # of them those named
        named = backend.documents.readable(access, given.memstore.documents)
        documents = [document for document in documents if document in named]
    question = given.question(
        backend,
        access,
        text,
        given.sampling(backend, given.max_output_tokens),
        [*before, *turns],
        documents=documents,
        conversation=conversation,
        keep=given.store is not False or conversation is not None,
        max_sources=max(given.memstore.max_sources, attached.most if attached else 0),
    )
    return Asked(given, question, attached, stored)


def _before(
    backend: Backend, given: ResponseRequest, access: Access
) -> tuple[Conversation | None, Sequence[Turn]]:
    """The conversation that goes on, if it has a name, and its turns."""
    which, previous = given.conversation, given.previous_response_id
    if which is not None and previous is not None:
        raise ApiError(
            400,
            "previous_response_id and conversation exclude each other",
            code="invalid_value",
            param="previous_response_id",
        )
    conversations = backend.conversations
    if which is not None:
        name = which.id if isinstance(which, Named) else which
        conversation = conversations.get(access.name, name)
        return conversation, conversations.turns(conversation)
    return None, () if previous is None else conversations.turns_of_response(access.name, previous)


def _attached(
    backend: Backend, vector_stores: VectorStores, given: ResponseRequest, access: Access
) -> Attached | None:
    """The files of its tool."""
    if not given.tools:
        return None
    if len(given.tools) > 1:
        raise unsupported("tools", "with more than one file_search is not supported here")
    return file_search.attach(vector_stores, backend.documents, access, given.tools[0])


def _message(role: str, content: Content) -> dict[str, Any]:
    """OpenAI's item of a message of the input."""
    assistant = role == "assistant"
    more: dict[str, Any] = {"annotations": []} if assistant else {}
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    kind = "output_text" if assistant else "input_text"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": role,
        "status": "completed",
        "content": [{"type": kind, "text": text, **more} for text in texts],
    }
