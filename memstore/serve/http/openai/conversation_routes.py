"""/v1/conversations: named conversations are made, listed turn by turn, described and deleted."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from memstore.serve.background.forgetting import Forgetting
from memstore.serve.http.authorization import Reads
from memstore.serve.http.openai.filters import Metadata
from memstore.serve.http.paging import Paging, page_of
from memstore.serve.state.conversations import Conversation, Conversations
from memstore.serve.strict import Strict


class Described(Strict):
    """What a client says of a conversation."""

    metadata: Metadata | None = None


def router(conversations: Conversations, forgetting: Forgetting) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/conversations")
    def create(access: Reads, given: Described | None = None) -> dict[str, Any]:
        metadata = None if given is None else given.metadata
        return conversation_object(conversations.create(access.name, metadata=metadata))

    @routes.get("/v1/conversations/{name}")
    def retrieve(name: str, access: Reads) -> dict[str, Any]:
        return conversation_object(conversations.get(access.name, name))

    @routes.post("/v1/conversations/{name}")
    def update(name: str, given: Described, access: Reads) -> dict[str, Any]:
        return conversation_object(conversations.describe(access.name, name, given.metadata or {}))

    @routes.get("/v1/conversations/{name}/items")
    def items(name: str, access: Reads, paging: Annotated[Paging, Query()]) -> dict[str, Any]:
        listed = []
        turns = conversations.turns(conversations.get(access.name, name))
        for number, turn in enumerate(turns):
            for role, text in (("user", turn.question), ("assistant", turn.answer)):
                kind = "input_text" if role == "user" else "output_text"
                more: dict[str, Any] = {} if role == "user" else {"annotations": []}
                listed.append(
                    {
                        "id": f"msg_{number}_{role}",
                        "type": "message",
                        "role": role,
                        "status": "completed",
                        "content": [{"type": kind, "text": text, **more}],
                    }
                )
        return page_of(listed, paging)

    @routes.delete("/v1/conversations/{name}")
    def delete(name: str, access: Reads) -> dict[str, Any]:
        forgetting.conversation(access.name, name)
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    return routes


def conversation_object(conversation: Conversation) -> dict[str, Any]:
    """OpenAI's object of a conversation."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }
