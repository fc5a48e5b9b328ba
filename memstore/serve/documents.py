"""The documents of the served memory: list, search, add and delete them with an API key's rights,
ingest uploads in the background, and the routes under /v1/memstore for all this.
"""

import re
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from memstore.disk.format.document import Document
from memstore.documents import read
from memstore.errors import DocumentNotFound, MemoryLocked, MemstoreError
from memstore.model.answer import Matches, block_texts
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import Text
from memstore.serve.access import UPLOADS, Access, Rights, check_writing
from memstore.serve.api_errors import ApiError, Busy, as_api_error
from memstore.serve.disconnect import unless_gone
from memstore.serve.requests import Phrase, Strict, entries
from memstore.serve.settings import ServeSettings
from memstore.serve.worker import Job, Worker
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore, Names

_INTERRUPTED = "its ingest was interrupted; upload it again to resume"
_NAME_BYTES = 400
_FAILED = 100  # remembered failed uploads
_WAIT_SECONDS = 30.0  # a deletion's wait for an upload to stop at the end of a chunk
_PATIENCE = 3600.0  # seconds that an upload whose turn has come waits for another writing process
_CONVERTED_AT_ONCE = 2  # concurrent conversions, each a process that takes much memory
_BLOCKS = 64  # most blocks of text in a response
# control characters, line separators, direction marks, and lone surrogates
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(eq=False)
class Upload:
    """An upload that is not ingested yet, or failed. job.latest: its last IngestProgress; ended:
    when it failed.
    """

    characters: int
    digest: str
    notes: Sequence[str]
    job: Job = field(init=False)
    error: ApiError | None = None
    ended: float = 0.0

    @property
    def active(self) -> bool:
        """Is it waiting or being ingested?"""
        return not self.job.finished.is_set()


class Documents:
    """The documents of a memory for the server's clients. Safe for several threads."""

    def __init__(
        self, model: ModelAPI, store: MemoryStore, worker: Worker, settings: ServeSettings
    ) -> None:
        self._model, self._store, self._worker = model, store, worker
        self._most_tokens = settings.message_tokens
        self._most_characters = 4 * settings.body_bytes  # of all waiting uploads
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}  # by document name

    # Reading

    def readable(self, access: Access, names: list[str] | None = None) -> list[str]:
        """The names of ready documents: those given, or all that the key may read, oldest first.
        Raises ApiError (404) for an unknown name, InvalidInput for a document that is not ready.
        """
        if names is None:
            return [document.name for document in self._store.ready() if access.sees(document.name)]
        for name in names:
            self.check(access, name)
        return [document.name for document in self._store.ready(names)]

    def chosen(self, access: Access, names: list[str] | None) -> Names:
        """The documents to search, for a question in the queue. Named documents must exist now;
        None: all that the key may read when the question is answered.
        """
        if names is not None:
            return self.readable(access, names)
        return partial(self.readable, access) if access.only else None

    def check(self, access: Access, name: str) -> None:
        """Raises ApiError (404) if the document does not exist, or the key may not read it."""
        if not (access.sees(name) and self._store.has(name)):
            raise ApiError(404, f"no document {name!r}")

    def writable(self, access: Access) -> bool:
        """May a key add and delete documents?"""
        return access.write and not self._store.read_only

    def listed(self, access: Access) -> list[dict[str, Any]]:
        """The documents and uploads that a key may see, oldest first, as JSON values."""
        documents = {one.name: one for one in self._store.documents() if access.sees(one.name)}
        with self._lock:
            uploads = {name: one for name, one in self._uploads.items() if access.sees(name)}
        rows = [self._row(name, one, uploads.pop(name, None)) for name, one in documents.items()]
        return rows + [self._row(name, None, upload) for name, upload in uploads.items()]

    def row(self, access: Access, name: str) -> dict[str, Any]:
        """One row of `listed`. Raises ApiError (404)."""
        with self._lock:
            upload = self._uploads.get(name)
        if upload is None or not access.sees(name):
            self.check(access, name)
        document = self._store.document(name) if self._store.has(name) else None
        return self._row(name, document, upload)

    def blocks(self, access: Access, name: str, first: int, end: int) -> list[dict[str, Any]]:
        """Blocks first .. end - 1 of a document, {"block", "span", "text"} each; their texts are
        contiguous. Raises ApiError (404), CorruptMemory.
        """
        self.check(access, name)
        document = self._store.document(name)
        return [
            {
                "block": one.block,
                "span": [one.start - len(one.gap), one.end],
                "text": one.gap + one.text,
            }
            for one in block_texts(self._model.tokenizer, self._store, document, first, end)
        ]

    async def search(
        self, access: Access, query: str, names: list[str] | None, top_k: int
    ) -> Matches:
        """The passages most similar to a query, best first. Raises ApiError, Busy, InvalidInput."""
        self.check_length(query, "query")

        def work() -> Matches:
            wanted = self.chosen(access, names)
            if not self._store.ready(wanted):
                return Matches(answered=False)
            return self._model.search(query, self._store, documents=wanted, top_k=top_k)

        return await self._worker.run(work)

    def check_length(self, text: str, param: str) -> None:
        """Raises ApiError (400) for a text of too many tokens: the model reads it in one step."""
        size, most = len(text.encode()), self._most_tokens  # a token has at least one byte
        if size > most and (size > 16 * most or len(self._model.tokenizer.encode(text)) > most):
            raise ApiError(
                400,
                f"{param}: a text of more than {most:,} tokens; upload it as a document",
                code="context_length_exceeded",
                param=param,
            )

    # Uploads

    def add(self, access: Access, text: Text, mode: Mode = "new") -> Upload:
        """Queue a text for ingest as the document text.name.

        mode: as ModelAPI.ingest. Raises ApiError: 403 for a name that the key may not write, 409
        for a name in use; Busy, Stopped, ReadOnlyMemory, InvalidInput for an empty text.
        """
        check_writing(access)
        self._store.writable()
        name = text.name
        check_name(name)
        if not access.sees(name):
            raise ApiError(403, f"this key may not write a document {name!r}", param="name")
        text.check()
        if mode == "new":
            self._check_free(name, text.digest)
        with self._lock:
            known = self._uploads.get(name)
            if known is not None and known.active:
                raise _conflict(f"a document {name!r} is being ingested; wait until it is ready")
            upload = Upload(len(text.content), text.digest, text.notes)
            waiting = sum(one.characters for one in self._uploads.values() if one.active)
            if waiting and waiting + upload.characters > self._most_characters:
                raise Busy("too many documents wait to be ingested; upload again later")
            ended = partial(self._ended, upload, name)
            upload.job = self._worker.in_background(self._ingesting(text, mode), ended)
            self._uploads[name] = upload
        return upload

    def delete(self, access: Access, name: str) -> None:
        """Delete a document and its upload. Raises ApiError (404; 409 for an upload that does not
        stop; 403 for a read-only key), MemoryLocked, ReadOnlyMemory.
        """
        check_writing(access)
        self._store.writable()
        with self._lock:
            upload = self._uploads.get(name) if access.sees(name) else None
        if upload is None:
            self.check(access, name)
        else:
            self._worker.cancel(upload.job)
            if not upload.job.finished.wait(_WAIT_SECONDS):
                raise _conflict("the document is being ingested; delete it again later")
            with self._lock:
                if self._uploads.get(name) is upload:
                    del self._uploads[name]
        if upload is None or self._store.has(name):  # else its ingest never began
            with suppress(DocumentNotFound):
                self._store.forget(name)

    def _check_free(self, name: str, digest: str) -> None:
        """Raises ApiError (409) if the memory has a document of this name with other text."""
        with suppress(DocumentNotFound):
            document = self._store.document(name)
            if document.tokens and document.source_hash != digest:
                raise _conflict(
                    f"document {name!r} exists with other text; delete it, or send mode=replace"
                )

    def _ingesting(self, text: Text, mode: Mode) -> Generator[Any, None, Document]:
        """As ModelAPI.ingesting; yields None while another process writes."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return (yield from self._model.ingesting(text, self._store, mode=mode))
            except MemoryLocked:
                if time.monotonic() >= until:
                    raise
            yield None

    def _ended(self, upload: Upload, name: str, job: Job) -> None:
        """Record the end of an upload. Called on the model's thread."""
        error, job.error = job.error, None  # its traceback holds the text
        if error is not None:
            upload.error, upload.ended = as_api_error(error), time.time()
            with suppress(MemstoreError):
                document = self._store.document(name)
                if document.state != "ready" and document.source_hash == upload.digest:
                    self._store.forget(name)  # drop the unfinished document
        with self._lock:
            if error is None and self._uploads.get(name) is upload:
                del self._uploads[name]
            failed = [name for name, one in self._uploads.items() if one.error is not None]
            for name in failed[: max(0, len(failed) - _FAILED)]:
                del self._uploads[name]

    def _row(self, name: str, document: Document | None, upload: Upload | None) -> dict[str, Any]:
        """A document, its upload, or both, as JSON values. state: "waiting", "ingesting", "ready",
        "failed"; progress: 0..1; notes: on parts of the file that could not be read.
        """
        if document and document.state == "ready" and upload and upload.error:
            same = document.source_hash == upload.digest
            upload = None if same or document.created > upload.ended else upload  # read since
        error = None if upload is None or upload.error is None else upload.error.message
        if document and not error and not (upload and upload.active):
            error = _INTERRUPTED if self._store.interrupted(document) else None
        row: dict[str, Any] = {
            "object": "memstore.document",
            "name": name,
            "state": "failed" if error else "waiting",
            "progress": 0.0,
            "error": error,
            "tokens": 0,
            "blocks": 0,
            "bytes": 0,
            "created": None,
            "notes": list(upload.notes) if upload else document.notes if document else [],
        }
        if document is not None:
            ready = document.state == "ready"
            row |= {
                "state": "ready" if ready else "failed" if error else "ingesting",
                "progress": float(ready),
                "tokens": document.tokens,
                "blocks": document.blocks,
                "bytes": document.bytes,
                "created": int(document.created),
            }
        if upload is not None and upload.active:
            row["state"] = "waiting"
            if (at := upload.job.latest) is not None:
                row |= {
                    "state": "ingesting",
                    "progress": round(at.characters / max(1, at.total_characters), 4),
                    "tokens": at.tokens,
                }
        return row


def _converted(file: UploadFile, name: str | None) -> Text:
    """The text of a file, as the document `name`, by default the last part of its filename: clients
    may send whole paths. Raises ApiError, UnreadableDocument.
    """
    filename = file.filename or ""
    name = name or filename.replace("\\", "/").rsplit("/", 1)[-1].strip()
    check_name(name)
    return Text(read(file.file.read(), filename or name), name)


def check_name(name: str) -> None:
    """Raises ApiError (400) for an invalid document name."""
    size = len(name.encode(errors="replace"))
    if _NOT_IN_NAMES.search(name) or not name.strip().strip(".") or size > _NAME_BYTES:
        message = f"a document's name has 1 to {_NAME_BYTES} bytes, and no control characters"
        raise ApiError(400, message, param="name")


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="document_exists", param="name")


class NewFile(Strict):
    """The form of an upload of one file. name: of the document; default: the file's."""

    file: Annotated[list[UploadFile], entries(1, least=1)]
    name: str | None = None
    mode: Mode = "new"


class Search(Strict):
    """A request to search."""

    query: Phrase
    documents: Annotated[list[str], entries()] | None = None
    top_k: Annotated[int, Field(ge=1, le=100)] = 5


def router(documents: Documents) -> APIRouter:
    """The routes: upload, list, delete, search, and the text of a document."""
    routes = APIRouter()
    limiter = CapacityLimiter(_CONVERTED_AT_ONCE)

    @routes.post(UPLOADS, status_code=202)
    async def upload(
        access: Rights, given: Annotated[NewFile, Form(media_type="multipart/form-data")]
    ) -> dict[str, Any]:
        text = await run_sync(_converted, given.file[0], given.name, limiter=limiter)
        await run_in_threadpool(documents.add, access, text, given.mode)
        return await run_in_threadpool(documents.row, access, text.name)

    @routes.get(UPLOADS)
    def listed(access: Rights) -> dict[str, Any]:
        return {"object": "list", "data": documents.listed(access)}

    @routes.delete(f"{UPLOADS}/{{name:path}}")
    def delete(name: str, access: Rights) -> dict[str, Any]:
        documents.delete(access, name)
        return {"object": "memstore.document.deleted", "name": name, "deleted": True}

    @routes.post("/v1/memstore/search")
    async def search(request: Request, given: Search, access: Rights) -> dict[str, Any]:
        work = documents.search(access, given.query, given.documents, given.top_k)
        found = await unless_gone(request, work)
        data = [source.citation for source in found]
        return {"object": "list", "data": data, "answered": found.answered}

    @routes.get("/v1/memstore/text")
    def text(
        access: Rights,
        document: str,
        first: Annotated[int, Query(ge=0, lt=2**48)] = 0,
        end: Annotated[int | None, Query(ge=0, lt=2**48)] = None,
    ) -> dict[str, Any]:
        last = first + _BLOCKS if end is None else min(end, first + _BLOCKS)
        blocks = documents.blocks(access, document, first, last)
        row = documents.row(access, document)
        return {"object": "memstore.text", "document": row, "data": blocks}

    return routes
