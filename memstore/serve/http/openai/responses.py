"""/v1/responses: answers are made, given back and deleted."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from memstore.serve.background.forgetting import Forgetting
from memstore.serve.http.authorization import Reads, owner
from memstore.serve.http.openai.prompts import Backend
from memstore.serve.http.openai.response_body import ResponseBody
from memstore.serve.http.openai.response_request import ResponseRequest, understand
from memstore.serve.http.paging import Paging, page_of
from memstore.serve.http.sse import streamed, whole
from memstore.serve.state.vector_tables import VectorStores


class Retrieving(BaseModel):
    """What is asked of a stored response: nothing but that."""

    model_config = ConfigDict(extra="forbid")


def router(backend: Backend, vector_stores: VectorStores, forgetting: Forgetting) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    conversations = backend.conversations

    @routes.post("/v1/responses", response_model=None)
    async def respond(
        request: Request, given: ResponseRequest, access: Reads
    ) -> Response | dict[str, Any]:
        backend.model.check(given.model)
        asked = await run_in_threadpool(understand, backend, vector_stores, given, access)
        pieces, outcome = backend.answers.begin(owner(request), asked.question)
        body = ResponseBody(backend.model.name, conversations, asked)
        if given.stream:
            return await streamed(request, body.events(pieces, outcome), pieces)
        text = await whole(request, pieces)
        return await run_in_threadpool(body.finished, text, outcome)

    @routes.get("/v1/responses/{name}")
    def retrieve(name: str, access: Reads, given: Annotated[Retrieving, Query()]) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(conversations.response(access.name, name)["body"])
        return body

    @routes.get("/v1/responses/{name}/input_items")
    def input_items(name: str, access: Reads, paging: Annotated[Paging, Query()]) -> dict[str, Any]:
        return page_of(json.loads(conversations.response(access.name, name)["input"]), paging)

    @routes.delete("/v1/responses/{name}")
    def delete(name: str, access: Reads) -> dict[str, Any]:
        forgetting.response(access.name, name)
        return {"id": name, "object": "response.deleted", "deleted": True}

    return routes
