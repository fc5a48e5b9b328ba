"""/v1/vector_stores/{id}/files: the files of a vector store, one at a time."""

import json
from functools import partial
from sqlite3 import Row
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads, Writes
from memstore.serve.http.openai.filters import Attributes
from memstore.serve.http.openai.vector_stores import Chunking, FileId
from memstore.serve.http.paging import Paging, page
from memstore.serve.state.uploads import Uploads
from memstore.serve.state.vector_tables import LINKS, Entry, VectorStores
from memstore.serve.strict import Strict

AT = "/v1/vector_stores/{store_id}"


class AttachFile(Strict):
    """A file, and what is known of it in this store."""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    @property
    def entry(self) -> Entry:
        """As it is stored."""
        return Entry(self.file_id, self.attributes or {})


class UpdateFile(Strict):
    """Other attributes; null for none."""

    attributes: Attributes | None


class LinkPaging(Paging):
    """As Paging. filter: only files with this status."""

    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


def router(stores: VectorStores, uploads: Uploads) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post(f"{AT}/files")
    def attach(store_id: str, access: Writes, asked: AttachFile) -> dict[str, Any]:
        return link_object(store_id, stores.attach(store_id, asked.entry, access))

    @routes.get(f"{AT}/files")
    def files(
        store_id: str, access: Reads, paging: Annotated[LinkPaging, Query()]
    ) -> dict[str, Any]:
        number = stores.row(store_id, access)["number"]
        return links_page(stores, store_id, "l.store = ?", number, access, paging)

    @routes.get(f"{AT}/files/{{file_id}}")
    def retrieve(store_id: str, file_id: str, access: Reads) -> dict[str, Any]:
        return link_object(store_id, stores.link(stores.row(store_id, access), file_id, access))

    @routes.post(f"{AT}/files/{{file_id}}")
    def update(store_id: str, file_id: str, access: Writes, asked: UpdateFile) -> dict[str, Any]:
        attributes = asked.attributes or {}
        return link_object(store_id, stores.set_attributes(store_id, file_id, attributes, access))

    @routes.delete(f"{AT}/files/{{file_id}}")
    def detach(store_id: str, file_id: str, access: Writes) -> dict[str, Any]:
        stores.detach(store_id, file_id, access)
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @routes.get(f"{AT}/files/{{file_id}}/content")
    def content(store_id: str, file_id: str, access: Reads) -> dict[str, Any]:
        link = stores.link(stores.row(store_id, access), file_id, access)
        if link["status"] != "completed":
            raise ApiError(
                400,
                f"file {file_id!r} is {link['status']}: it has no text yet",
                code="invalid_value",
                param="file_id",
            )
        text = uploads.text_of_document(link["document"]).decode(errors="replace")
        return {
            "object": "vector_store.file_content.page",
            "file_id": file_id,
            "filename": link["filename"],
            "attributes": json.loads(link["attributes"]),
            "data": [{"type": "text", "text": text}],
            "has_more": False,
            "next_page": None,
        }

    return routes


def link_object(store_id: str, row: Row) -> dict[str, Any]:
    """OpenAI's object of a file in a vector store."""
    failed = row["status"] == "failed"
    return {
        "id": row["id"],
        "object": "vector_store.file",
        "created_at": row["created_at"],
        "vector_store_id": store_id,
        "status": row["status"],
        "last_error": {"code": row["error_code"], "message": row["error"]} if failed else None,
        "usage_bytes": row["stored_bytes"],
        "attributes": json.loads(row["attributes"]),
        "chunking_strategy": {"type": "other"},
    }


def links_page(
    stores: VectorStores, store_id: str, links: str, number: int, access: Access, paging: LinkPaging
) -> dict[str, Any]:
    """A page of links: those of a store, or of a batch, by its number."""
    select = f"SELECT * FROM ({LINKS} AND {links}) WHERE number > 0"
    values: list[Any] = [number]
    if paging.filter is not None:
        select, values = f"{select} AND status = ?", [*values, paging.filter]
    keep = (lambda row: access.sees(row["document"])) if access.only else None
    return page(stores.database, select, values, paging, partial(link_object, store_id), keep=keep)
