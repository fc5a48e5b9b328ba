"""The tools that an agent has of a memory by MCP: ask, search, documents, ingest, forget."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from memstore.disk.format.document import Document, is_of_prompt
from memstore.errors import InvalidInput
from memstore.model.answer import Source
from memstore.model.document_ingest import Ingesting, IngestProgress
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.paths import expanded
from memstore.serve.answering.answers import Answers, Question
from memstore.serve.answering.jobs import Job
from memstore.serve.answering.sampling import Sampling
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import ApiError, Busy
from memstore.serve.api_keys import Access
from memstore.serve.background.file_ingest import FileIngest
from memstore.serve.document_access import DocumentAccess
from memstore.serve.mcp.arguments import Ask, Documents, Forget, Ingest, Search
from memstore.serve.state.uploads import Uploads
from memstore.serve.strict import Strict
from memstore.store.memory_store import MemoryStore

OnProgress = Callable[[float, float], Awaitable[None]]
"""Awaited with how much is done, and of how much."""

_MOST_JOBS = 64  # documents of a key that wait to be read: each holds its text
_SECONDS_BETWEEN = 0.5  # two looks at how far an ingest is


@dataclass(frozen=True)
class Asker:
    """Who calls a tool. paths: directories whose files he may have read; owner: see Worker."""

    access: Access
    owner: str
    paths: Sequence[Path] = ()


@dataclass(frozen=True)
class MemoryTools:
    """The tools and what they work on; each gives plain JSON values. most_tokens: of
    an answer.
    """

    reader: ModelAPI
    store: MemoryStore
    worker: Worker
    answers: Answers
    documents: DocumentAccess
    uploads: Uploads
    file_ingest: FileIngest
    most_tokens: int

    async def ingest(self, asker: Asker, given: Ingest, progress: OnProgress) -> dict[str, Any]:
        """Read a document, behind the questions of others; given up, what was read is kept."""
        if not asker.access.sees(given.name) or is_of_prompt(given.name):
            raise ApiError(403, f"this key may not write a document {given.name!r}")
        if given.mode == "append" and not self.documents.visible(asker.access, given.name):
            raise ApiError(404, f"there is no document {given.name!r} to append to")
        if self.worker.jobs_of(asker.owner) >= _MOST_JOBS:
            raise Busy("too many documents of this key wait to be read; ingest again later", 5)
        text = await run_in_threadpool(_text, asker, given)
        size = await run_in_threadpool(self._count, asker, given, text)
        steps = self.reader.ingesting(text, self.store, name=given.name, mode=given.mode)
        at: list[IngestProgress] = []
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_end(job: Job) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.set)

        job = self.worker.in_background(asker.owner, _noted(steps, at), on_end)
        try:
            while not ended.is_set():
                try:
                    await asyncio.wait_for(ended.wait(), _SECONDS_BETWEEN)
                except TimeoutError:
                    if at:
                        await progress(at[-1].characters, at[-1].total_characters)
        finally:
            self.worker.cancel(job)
        if job.error is not None:
            raise job.error
        if job.state == "cancelled":
            raise ApiError(503, "the server is stopping; ingest again to go on from there")
        if given.mode != "append":
            await run_in_threadpool(self.uploads.counted, given.name, size)
        return _row(job.result)

    def _count(self, asker: Asker, given: Ingest, text: Text) -> int:
        """Have a text count for its key; its bytes. Raises ApiError for a full quota."""
        content = text.content
        size = content.stat().st_size if isinstance(content, Path) else len(content.encode())
        more = given.mode == "append"
        self.uploads.count(asker.access, given.name, size, more=more)
        return size

    async def ask(self, asker: Asker, given: Ask, progress: OnProgress) -> dict[str, Any]:
        """Answer a question in a session of its own."""
        if not given.question.strip():
            raise InvalidInput("the question is empty")
        names = await run_in_threadpool(self._readable, asker, given.documents, "ask")
        defaults = self.reader.answering
        sampling = Sampling(
            min(given.max_new_tokens or defaults.max_new_tokens, self.most_tokens),
            sentence=defaults.until_sentence,
        )
        access = asker.access
        question = Question(
            given.question,
            sampling,
            names,
            partial(self._readable, asker, None, "ask") if given.documents is None else None,
            owner=access.name,
            keep=False,
            may_read=access.sees,
        )
        pieces, outcome = self.answers.begin(asker.owner, question)
        try:
            async for _ in pieces:
                pass
        finally:
            await pieces.aclose()
        return {
            "answer": outcome.text,
            "answered": outcome.answered,
            "absent": outcome.memstore["absent"],
            "sources": [
                {name: source[name] for name in ("document", "span", "place", "text", "weight")}
                for source in outcome.memstore["sources"]
            ],
        }

    async def search(self, asker: Asker, given: Search, progress: OnProgress) -> dict[str, Any]:
        """Find passages."""
        names = await run_in_threadpool(self._readable, asker, given.documents, "search")
        reader, store = self.reader, self.store
        matches = await self.worker.run(
            asker.owner,
            lambda: reader.search(given.phrase, store, documents=names, top_k=given.top_k),
        )
        return {
            "answered": matches.answered,
            "passages": [_passage(source) for source in matches],
            "absent": list(matches.absent),
        }

    async def list_documents(
        self, asker: Asker, given: Documents, progress: OnProgress
    ) -> dict[str, Any]:
        """List the documents, also those that are being read."""
        rows = await run_in_threadpool(self.store.documents)
        return {
            "documents": [
                _row(row) for row in rows if self.documents.visible(asker.access, row.name)
            ]
        }

    async def forget(self, asker: Asker, given: Forget, progress: OnProgress) -> dict[str, Any]:
        """Forget a document."""

        def work() -> None:
            if not self.documents.visible(asker.access, given.name):
                raise ApiError(404, f"there is no document {given.name!r}")
            self.file_ingest.forget(given.name)

        await run_in_threadpool(work)
        return {"forgotten": given.name}

    def _readable(self, asker: Asker, names: list[str] | None, to: str) -> list[str]:
        readable = self.documents.readable(asker.access, names)
        if not readable:
            raise InvalidInput(f"there is no finished document to {to}; ingest one first")
        return readable


def _noted(steps: Ingesting, at: list[IngestProgress]) -> Ingesting:
    """The same steps; `at` holds the latest."""
    try:
        while True:
            at[:] = [next(steps)]
            yield at[0]
    except StopIteration as end:
        document: Document = end.value
        return document
    finally:
        steps.close()


def _text(asker: Asker, given: Ingest) -> Text:
    if (given.text is None) == (given.path is None):
        raise InvalidInput("give either a text or a path")
    if given.path is None:
        assert given.text is not None
        text = Text(given.text, given.name)
    else:
        text = Text(_allowed(given.path, asker.paths), given.name)
    try:
        text.check()
    except InvalidInput as error:
        raise InvalidInput(str(error).replace(str(text.content), given.path or "")) from None
    return text


def _allowed(path: str, directories: Sequence[Path]) -> Path:
    """The file that a client named. Raises ApiError for one outside of these directories, whether
    it is there or not.
    """
    try:
        file = expanded(path).resolve()
    except (OSError, ValueError, RuntimeError):  # a zero byte, a loop of links
        file = None
    if file is None or not any(file.is_relative_to(directory) for directory in directories):
        raise ApiError(403, "this server reads no file there (see --allow-paths); give the text")
    if not file.is_file():
        raise InvalidInput(f"{path} is no file")
    return file


def _passage(source: Source) -> dict[str, Any]:
    return {
        "document": source.document,
        "span": list(source.span),
        "place": source.place,
        "text": source.text,
        "weight": source.weight,
    }


def _row(document: Document) -> dict[str, Any]:
    return {
        "name": document.name,
        "state": "ready" if document.state == "ready" else "reading",
        "tokens": document.tokens,
        "bytes": document.bytes,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(document.created)),
    }


Given = Any  # what a tool takes
Run = Callable[[MemoryTools, Asker, Given, OnProgress], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Tool:
    """A tool: what an agent is told of it, and what it does."""

    description: str
    takes: type[Strict]
    run: Run
    writes: bool = False
    destroys: bool = False


TOOLS = {
    "ask": Tool(
        "Ask the memory a question. It answers in the words of its documents, and says which "
        "passages it read, the most telling first.",
        Ask,
        MemoryTools.ask,
    ),
    "search": Tool(
        "Find the passages of the memory that are most like a phrase, word by word, best first; "
        "their weights compare them, and are no shares of words.",
        Search,
        MemoryTools.search,
    ),
    "documents": Tool("List the documents of the memory.", Documents, MemoryTools.list_documents),
    "ingest": Tool(
        "Read a text into the memory, once; it can be asked and searched from then on.",
        Ingest,
        MemoryTools.ingest,
        writes=True,
    ),
    "forget": Tool(
        "Delete a document from the memory; no later answer reads it.",
        Forget,
        MemoryTools.forget,
        writes=True,
        destroys=True,
    ),
}
