"""What an agent may do with a memory by MCP: the tools, and what each of them takes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from memstore.disk.document import Document, is_of_prompt
from memstore.errors import InvalidInput
from memstore.model.answer import Source
from memstore.model.ingest import Ingesting, IngestProgress
from memstore.model.text import Text
from memstore.serve.answering.admission_queue import Busy
from memstore.serve.answering.answers import Question, begin
from memstore.serve.answering.sampling import Sampling
from memstore.serve.answering.worker import Job
from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.service import Service
from memstore.serve.strict import Strict, entries

OnProgress = Callable[[float, float], Awaitable[None]]
"""Told how much is done, and of how much."""

_MOST_JOBS = 64  # documents of a key that wait to be read: each holds its text
_SECONDS_BETWEEN = 0.5  # two looks at how far an ingest is
_MOST = 100  # passages of a search
# a name is shown in lines: no control characters, and none that break or turn them
_PLAIN = "^[^\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]+$"
_LONGEST = 8192  # characters of what is asked: all of it is read at once


@dataclass(frozen=True)
class Asker:
    """Who calls a tool. paths: directories whose files he may have read; owner: see Worker."""

    access: Access
    owner: str
    paths: Sequence[Path] = ()


class Ingest(Strict):
    """What `ingest` takes."""

    name: str = Field(
        min_length=1, max_length=400, pattern=_PLAIN, description="The document's name."
    )
    text: str | None = Field(
        default=None, pattern=r"^[^\x00]*$", description="The text of the document."
    )
    path: str | None = Field(
        default=None, description="Or a UTF-8 file on the server, where it allows that directory."
    )
    mode: Literal["new", "append", "replace"] = Field(
        default="new", description="What to do where a document of that name is there."
    )


class Ask(Strict):
    """What `ask` takes."""

    question: str = Field(
        max_length=_LONGEST, description="Taken as typed; a few words of the answer are expected."
    )
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Ask these only."
    )
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest answer.")


class Search(Strict):
    """What `search` takes."""

    phrase: str = Field(max_length=_LONGEST, description="Words as they may stand in the text.")
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Search these only."
    )
    results: int = Field(default=5, ge=1, le=_MOST, description="How many passages.")


class Documents(Strict):
    """What `documents` takes: nothing."""


class Forget(Strict):
    """What `forget` takes."""

    name: str = Field(description="The document.")


Given = Any  # one of the above
Run = Callable[[Service, Asker, Given, OnProgress], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Tool:
    """A tool: what it is told to do, and what it gives as plain JSON values."""

    description: str
    takes: type[Strict]
    run: Run
    writes: bool = False
    destroys: bool = False


async def ingest(service: Service, asker: Asker, given: Ingest, told: OnProgress) -> dict[str, Any]:
    """Read a document, behind the questions of others; given up, what was read is kept."""
    if not asker.access.sees(given.name) or is_of_prompt(given.name):
        raise ApiError(403, f"this key may not write a document {given.name!r}")
    if given.mode == "append" and not service.visible(asker.access, given.name):
        raise ApiError(404, f"there is no document {given.name!r} to append to")
    if service.worker.jobs_of(asker.owner) >= _MOST_JOBS:
        raise Busy("too many documents of this key wait to be read; ingest again later", 5)
    text = await run_in_threadpool(_text, asker, given)
    size = await run_in_threadpool(_count, service, asker, given, text)
    steps = service.reader.ingesting(text, service.store, name=given.name, mode=given.mode)
    at: list[IngestProgress] = []
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_end(job: Job) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(ended.set)

    job = service.worker.in_background(asker.owner, _noted(steps, at), on_end)
    try:
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), _SECONDS_BETWEEN)
            except TimeoutError:
                if at:
                    await told(at[-1].characters, at[-1].total_characters)
    finally:
        service.worker.cancel(job)
    if job.error is not None:
        raise job.error
    if job.state == "cancelled":
        raise ApiError(503, "the server is stopping; ingest again to go on from there")
    if given.mode != "append":
        await run_in_threadpool(service.ingests.uploads.counted, given.name, size)
    return _row(job.result)


def _count(service: Service, asker: Asker, given: Ingest, text: Text) -> int:
    """Have a text count for its key; its bytes. Raises ApiError for a full quota."""
    content = text.content
    size = content.stat().st_size if isinstance(content, Path) else len(content.encode())
    more = given.mode == "append"
    service.ingests.uploads.count(asker.access, given.name, size, more=more)
    return size


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
        file = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # a zero byte, a loop of links
        file = None
    if file is None or not any(file.is_relative_to(directory) for directory in directories):
        raise ApiError(403, "this server reads no file there (see --allow-paths); give the text")
    if not file.is_file():
        raise InvalidInput(f"{path} is no file")
    return file


async def ask(service: Service, asker: Asker, given: Ask, told: OnProgress) -> dict[str, Any]:
    """Answer a question in a session of its own."""
    if not given.question.strip():
        raise InvalidInput("the question is empty")
    names = await run_in_threadpool(_readable, service, asker, given.documents, "ask")
    defaults = service.reader.answering
    sampling = Sampling(
        min(given.max_new_tokens or defaults.max_new_tokens, service.settings.max_tokens),
        sentence=defaults.until_sentence,
    )
    access = asker.access
    question = Question(
        given.question,
        sampling,
        names,
        partial(_readable, service, asker, None, "ask") if given.documents is None else None,
        owner=access.name,
        keep=False,
        may_read=access.sees,
        from_memory=True,
    )
    pieces, outcome = begin(service, asker.owner, question)
    try:
        async for _ in pieces:
            pass
    finally:
        await pieces.aclose()
    return {
        "answer": outcome.text,
        "answered": outcome.answered,
        "absent": outcome.told["absent"],
        "sources": [
            {name: source[name] for name in ("document", "span", "place", "text", "weight")}
            for source in outcome.told["sources"]
        ],
    }


async def search(service: Service, asker: Asker, given: Search, told: OnProgress) -> dict[str, Any]:
    """Find passages."""
    names = await run_in_threadpool(_readable, service, asker, given.documents, "search")
    reader, store = service.reader, service.store
    found = await service.worker.run(
        asker.owner,
        lambda: reader.search(given.phrase, store, documents=names, top_k=given.results),
    )
    return {"passages": [_passage(source) for source in found], "absent": list(found.absent)}


async def documents(
    service: Service, asker: Asker, given: Documents, told: OnProgress
) -> dict[str, Any]:
    """List the documents, also those that are being read."""
    found = await run_in_threadpool(service.store.documents)
    return {"documents": [_row(row) for row in found if service.visible(asker.access, row.name)]}


async def forget(service: Service, asker: Asker, given: Forget, told: OnProgress) -> dict[str, Any]:
    """Forget a document."""

    def work() -> None:
        if not service.visible(asker.access, given.name):
            raise ApiError(404, f"there is no document {given.name!r}")
        service.forget(given.name)

    await run_in_threadpool(work)
    return {"forgotten": given.name}


def _readable(service: Service, asker: Asker, names: list[str] | None, to: str) -> list[str]:
    found = service.documents(asker.access, names)
    if not found:
        raise InvalidInput(f"there is no finished document to {to}; ingest one first")
    return found


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


TOOLS = {
    "ask": Tool(
        "Ask the memory a question. It answers in the words of its documents, and says which "
        "passages it read, the most telling first.",
        Ask,
        ask,
    ),
    "search": Tool(
        "Find the passages of the memory that are most like a phrase, word by word, best first; "
        "their weights compare them, and are no shares of words.",
        Search,
        search,
    ),
    "documents": Tool("List the documents of the memory.", Documents, documents),
    "ingest": Tool(
        "Read a text into the memory, once; it can be asked and searched from then on.",
        Ingest,
        ingest,
        writes=True,
    ),
    "forget": Tool(
        "Delete a document from the memory; no later answer reads it.",
        Forget,
        forget,
        writes=True,
        destroys=True,
    ),
}
