"""/v1/vector_stores/{id}/file_batches: files are put into a vector store many together."""

from sqlite3 import Row
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query
from pydantic import model_validator

from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads, Writes
from memstore.serve.http.openai.filters import Attributes
from memstore.serve.http.openai.vector_store_files import AT, AttachFile, LinkPaging, links_page
from memstore.serve.http.openai.vector_stores import MOST_FILES, Chunking, FileId
from memstore.serve.state.file_batches import OF_BATCH, FileBatches
from memstore.serve.state.vector_tables import Entry, VectorStores
from memstore.serve.strict import Strict, entries


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


def router(stores: VectorStores, batches: FileBatches) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post(f"{AT}/file_batches")
    def create_batch(store_id: str, access: Writes, asked: CreateBatch) -> dict[str, Any]:
        row = batches.create(store_id, asked.entries, access)
        return _batch(batches, access, store_id, row)

    @routes.get(f"{AT}/file_batches/{{batch_id}}")
    def batch(store_id: str, batch_id: str, access: Reads) -> dict[str, Any]:
        row = batches.row(stores.row(store_id, access), batch_id)
        return _batch(batches, access, store_id, row)

    @routes.post(f"{AT}/file_batches/{{batch_id}}/cancel")
    def cancel(store_id: str, batch_id: str, access: Writes) -> dict[str, Any]:
        row = batches.cancel(stores.row(store_id, access), batch_id)
        return _batch(batches, access, store_id, row)

    @routes.get(f"{AT}/file_batches/{{batch_id}}/files")
    def batch_files(
        store_id: str, batch_id: str, access: Reads, paging: Annotated[LinkPaging, Query()]
    ) -> dict[str, Any]:
        number = batches.row(stores.row(store_id, access), batch_id)["number"]
        return links_page(stores, store_id, OF_BATCH, number, access, paging)

    return routes


def _batch(batches: FileBatches, access: Access, store_id: str, row: Row) -> dict[str, Any]:
    counts = batches.counts(row, access)
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
