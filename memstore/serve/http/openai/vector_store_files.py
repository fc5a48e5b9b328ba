"""/v1/vector_stores/{id}/files and /file_batches: the files of a vector store, one at a time or
many together.
"""

import json
from functools import partial
from sqlite3 import Row
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query
from pydantic import model_validator

from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads, Writes
from memstore.serve.http.openai.filters import Attributes
from memstore.serve.http.openai.vector_stores import MOST_FILES, Chunking, FileId
from memstore.serve.http.paging import Paging, page
from memstore.serve.state.uploads import Uploads
from memstore.serve.state.vector_tables import LINKS, Entry, VectorStores
from memstore.serve.strict import Strict, entries


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


class CreateBatch(Strict):
    """Files by their ids, all with the same attributes, or each with its own."""

    file_ids: Annotated[list[FileId], entries(MOST_FILES, least=1)] | None = None
    files: Annotated[list[AttachFile], entries(MOST_FILES, least=1)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("give either file_ids or files")
        if self.files is not None and self.attributes is not None:
            raise ValueError("attributes go with file_ids; give each of files its own")
        return self

    @property
    def entries(self) -> list[Entry]:
        """As they are stored."""
        if self.files is not None:
            return [file.entry for file in self.files]
        return [Entry(file, self.attributes or {}) for file in self.file_ids or []]


class LinkPaging(Paging):
    """As Paging. filter: only files with this status."""

    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None


def router(stores: VectorStores, uploads: Uploads) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    at = "/v1/vector_stores/{store_id}"

    def listed(
        store_id: str, inside: str, number: int, access: Access, paging: LinkPaging
    ) -> dict[str, Any]:
        select = f"SELECT * FROM ({LINKS} AND {inside}) WHERE number > 0"
        values: list[Any] = [number]
        if paging.filter is not None:
            select, values = f"{select} AND status = ?", [*values, paging.filter]
        keep = (lambda row: access.sees(row["document"])) if access.only else None
        return page(stores.database, select, values, paging, partial(_link, store_id), keep=keep)

    @routes.post(f"{at}/files")
    def attach(store_id: str, access: Writes, asked: AttachFile) -> dict[str, Any]:
        return _link(store_id, stores.attach(store_id, asked.entry, access))

    @routes.get(f"{at}/files")
    def files(
        store_id: str, access: Reads, paging: Annotated[LinkPaging, Query()]
    ) -> dict[str, Any]:
        number = stores.row(store_id, access)["number"]
        return listed(store_id, "l.store = ?", number, access, paging)

    @routes.get(f"{at}/files/{{file_id}}")
    def retrieve(store_id: str, file_id: str, access: Reads) -> dict[str, Any]:
        return _link(store_id, stores.link(stores.row(store_id, access), file_id, access))

    @routes.post(f"{at}/files/{{file_id}}")
    def update(store_id: str, file_id: str, access: Writes, asked: UpdateFile) -> dict[str, Any]:
        attributes = asked.attributes or {}
        return _link(store_id, stores.set_attributes(store_id, file_id, attributes, access))

    @routes.delete(f"{at}/files/{{file_id}}")
    def detach(store_id: str, file_id: str, access: Writes) -> dict[str, Any]:
        stores.detach(store_id, file_id, access)
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @routes.get(f"{at}/files/{{file_id}}/content")
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

    @routes.post(f"{at}/file_batches")
    def create_batch(store_id: str, access: Writes, asked: CreateBatch) -> dict[str, Any]:
        row = stores.create_batch(store_id, asked.entries, access)
        return _batch(stores, access, store_id, row)

    @routes.get(f"{at}/file_batches/{{batch_id}}")
    def batch(store_id: str, batch_id: str, access: Reads) -> dict[str, Any]:
        row = stores.batch(stores.row(store_id, access), batch_id)
        return _batch(stores, access, store_id, row)

    @routes.post(f"{at}/file_batches/{{batch_id}}/cancel")
    def cancel(store_id: str, batch_id: str, access: Writes) -> dict[str, Any]:
        row = stores.cancel(stores.row(store_id, access), batch_id)
        return _batch(stores, access, store_id, row)

    @routes.get(f"{at}/file_batches/{{batch_id}}/files")
    def batch_files(
        store_id: str, batch_id: str, access: Reads, paging: Annotated[LinkPaging, Query()]
    ) -> dict[str, Any]:
        number = stores.batch(stores.row(store_id, access), batch_id)["number"]
        inside = "l.number IN (SELECT file FROM file_batch_files WHERE batch = ?)"
        return listed(store_id, inside, number, access, paging)

    return routes


def _link(store_id: str, row: Row) -> dict[str, Any]:
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


def _batch(stores: VectorStores, access: Access, store_id: str, row: Row) -> dict[str, Any]:
    counts = stores.batch_counts(row, access)
    if counts["in_progress"]:
        status = "in_progress"
    elif row["cancelled"]:
        status = "cancelled"
    else:
        status = "failed" if 0 < counts["total"] == counts["failed"] else "completed"
    return {
        "id": row["id"],
        "object": "vector_store.files_batch",
        "created_at": row["created_at"],
        "vector_store_id": store_id,
        "status": status,
        "file_counts": counts,
    }
