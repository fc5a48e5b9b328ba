"""/v1/conversations: those that have a name, what was said in them, and forgetting them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from memstore.serve.api_keys import Reads
from memstore.serve.http.openai.filters import Metadata
from memstore.serve.http.paging import Paging, page_of
from memstore.serve.service import Service
from memstore.serve.state.conversations import told
from memstore.serve.strict import Strict


class Described(Strict):
    """What a client says of a conversation."""

    metadata: Metadata | None = None


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    conversations = service.conversations

    @routes.post("/v1/conversations")
    def create(access: Reads, given: Described | None = None) -> dict[str, Any]:
        metadata = None if given is None else given.metadata
        return told(conversations.create(access.name, metadata=metadata))

    @routes.get("/v1/conversations/{name}")
    def retrieve(name: str, access: Reads) -> dict[str, Any]:
        return told(conversations.get(access.name, name))

    @routes.post("/v1/conversations/{name}")
    def update(name: str, given: Described, access: Reads) -> dict[str, Any]:
        return told(conversations.describe(access.name, name, given.metadata or {}))

    @routes.get("/v1/conversations/{name}/items")
    def items(name: str, access: Reads, paging: Annotated[Paging, Query()]) -> dict[str, Any]:
        found = []
        for number, turn in enumerate(
            service.tree.turns(conversations.get(access.name, name).head)
        ):
            for role, text in (("user", turn.question), ("assistant", turn.answer)):
                kind = "input_text" if role == "user" else "output_text"
                more: dict[str, Any] = {} if role == "user" else {"annotations": []}
                found.append(
                    {
                        "id": f"msg_{number}_{role}",
                        "type": "message",
                        "role": role,
                        "status": "completed",
                        "content": [{"type": kind, "text": text, **more}],
                    }
                )
        return page_of(found, paging)

    @routes.delete("/v1/conversations/{name}")
    def delete(name: str, access: Reads) -> dict[str, Any]:
        service.forget_conversation(access.name, name)
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    return routes
