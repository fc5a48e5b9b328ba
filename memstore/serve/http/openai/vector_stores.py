"""/v1/vector_stores: sets of documents are made, listed, changed and deleted."""

import json
from functools import partial
from sqlite3 import Row
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads, Writes
from memstore.serve.http.openai.filters import Metadata
from memstore.serve.http.paging import Paging, page
from memstore.serve.state.vector_tables import Entry, VectorStores, expires_at, may_see
from memstore.serve.strict import Strict, entries

Name = Annotated[str, StringConstraints(max_length=256)]
FileId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MOST_FILES = 2000  # of one request


class ExpiresAfter(Strict):
    """A store that is not used for so long is empty from then on."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Field(ge=1, le=365)]


class Chunking(Strict):
    """Blocks are the model's own: `auto` is all there is."""

    type: Literal["auto"]


class CreateStore(Strict):
    """What a store is made of."""

    name: Name = ""
    description: Annotated[str, StringConstraints(max_length=512)] | None = None
    file_ids: Annotated[list[FileId], entries(MOST_FILES)] = Field(default=[])
    expires_after: ExpiresAfter | None = None
    chunking_strategy: Chunking | None = None
    metadata: Metadata | None = None


class UpdateStore(Strict):
    """What is changed of a store; null takes it away."""

    name: Name | None = None
    expires_after: ExpiresAfter | None = None
    metadata: Metadata | None = None


def router(stores: VectorStores) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/vector_stores")
    def create(access: Writes, asked: CreateStore) -> dict[str, Any]:
        files = [Entry(file, {}) for file in asked.file_ids]
        days = asked.expires_after.days if asked.expires_after else None
        metadata = asked.metadata or {}
        row = stores.create(asked.name, asked.description, metadata, days, files, access)
        return _store(stores, access, row)

    @routes.get("/v1/vector_stores")
    def listed(access: Reads, paging: Annotated[Paging, Query()]) -> dict[str, Any]:
        stores.expire()
        select = "SELECT * FROM vector_stores WHERE number > 0"
        show, keep = partial(_store, stores, access), partial(may_see, access=access)
        return page(stores.database, select, (), paging, show, keep=keep)

    @routes.get("/v1/vector_stores/{store_id}")
    def retrieve(store_id: str, access: Reads) -> dict[str, Any]:
        return _store(stores, access, stores.row(store_id, access))

    @routes.post("/v1/vector_stores/{store_id}")
    def update(store_id: str, access: Writes, asked: UpdateStore) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if "name" in asked.model_fields_set:
            changes["name"] = asked.name or ""
        if "metadata" in asked.model_fields_set:
            changes["metadata"] = json.dumps(asked.metadata or {})
        if "expires_after" in asked.model_fields_set:
            changes["expires_days"] = asked.expires_after.days if asked.expires_after else None
        return _store(stores, access, stores.update(store_id, changes, access))

    @routes.delete("/v1/vector_stores/{store_id}")
    def delete(store_id: str, access: Writes) -> dict[str, Any]:
        stores.delete(store_id, access)
        return {"id": store_id, "object": "vector_store.deleted", "deleted": True}

    return routes


def _store(stores: VectorStores, access: Access, row: Row) -> dict[str, Any]:
    counts, size = stores.counts(row, access)
    status = "in_progress" if counts["in_progress"] else "completed"
    days = row["expires_days"]
    return {
        "id": row["id"],
        "object": "vector_store",
        "created_at": row["created_at"],
        "name": row["name"],
        "description": row["description"],
        "status": "expired" if row["expired"] else status,
        "file_counts": counts,
        "usage_bytes": size,
        "last_active_at": row["last_active_at"],
        "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
        "expires_at": expires_at(row),
        "metadata": json.loads(row["metadata"]),
    }
