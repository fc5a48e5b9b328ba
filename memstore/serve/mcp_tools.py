"""The MCP tools of a memory: ask, search, documents, ingest, forget. Each takes a checked request
and returns JSON values.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from memstore.errors import InvalidInput
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import Text
from memstore.paths import expanded
from memstore.serve.answers import Answers, Question
from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.documents import Documents
from memstore.serve.requests import Strict, entries
from memstore.store.memory_store import MemoryStore

OnProgress = Callable[[float, float], Awaitable[None]]
"""Awaited with how much of an ingest is done, and of how much."""

_LONGEST = 8192  # characters of a question or phrase: all of it is read at once
_SECONDS_BETWEEN = 0.5  # progress reports of an ingest, at most


@dataclass(frozen=True)
class Caller:
    """The client of a call. paths: directories whose files it may have ingested."""

    access: Access
    paths: Sequence[Path] = ()


class Ask(Strict):
    """The request of `ask`."""

    question: str = Field(
        max_length=_LONGEST, description="Taken as typed; a few words of the answer are expected."
    )
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Ask these only."
    )
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest answer.")


class Search(Strict):
    """The request of `search`."""

    phrase: str = Field(max_length=_LONGEST, description="Words as they may stand in the text.")
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Search these only."
    )
    top_k: int = Field(default=5, ge=1, le=100, description="How many passages.")


class ListDocuments(Strict):
    """The request of `documents`: it has no arguments."""


class Ingest(Strict):
    """The request of `ingest`."""

    name: str = Field(min_length=1, description="The document's name.")
    text: str | None = Field(
        default=None, pattern=r"^[^\x00]*$", description="The text of the document."
    )
    path: str | None = Field(
        default=None, description="Or a file on the server, where it allows that directory."
    )
    mode: Literal["new", "replace"] = Field(
        default="new", description="What to do where the memory has a document of that name."
    )


class Forget(Strict):
    """The request of `forget`."""

    name: str = Field(description="The document.")


class MemoryTools:
    """The tools, and what they work with."""

    def __init__(
        self,
        model: ModelAPI,
        store: MemoryStore,
        answers: Answers,
        documents: Documents,
        *,
        most_tokens: int,
    ) -> None:
        """most_tokens: of an answer."""
        self.model, self.store, self.documents = model, store, documents
        self._answers, self._most_tokens = answers, most_tokens

    async def ask(self, caller: Caller, given: Ask, progress: OnProgress) -> dict[str, Any]:
        """Answer a question."""
        if not given.question.strip():
            raise InvalidInput("the question is empty")
        access, most = caller.access, given.max_new_tokens or self.model.answering.max_new_tokens
        named = given.documents
        if named is not None:
            named = await run_in_threadpool(self.documents.readable, access, named)
        question = Question(
            given.question,
            {"max_new_tokens": min(most, self._most_tokens)},
            lambda: self.documents.readable(access) if named is None else named,
            may_read=access.sees,
        )
        pieces, outcome = self._answers.begin(question)
        try:
            async for _ in pieces:
                pass
        finally:
            await pieces.aclose()
        return {
            "answer": outcome.text,
            "answered": outcome.answered,
            "sources": outcome.memstore["sources"],
        }

    async def search(self, caller: Caller, given: Search, progress: OnProgress) -> dict[str, Any]:
        """Find passages."""
        found = await self.documents.search(
            caller.access, given.phrase, given.documents, given.top_k
        )
        passages = [source.citation for source in found]
        return {"answered": found.answered, "passages": passages}

    async def list_documents(
        self, caller: Caller, given: ListDocuments, progress: OnProgress
    ) -> dict[str, Any]:
        """List the documents, and those that are being ingested."""
        rows = await run_in_threadpool(self.documents.listed, caller.access)
        return {"documents": [_row(row) for row in rows]}

    async def ingest(self, caller: Caller, given: Ingest, progress: OnProgress) -> dict[str, Any]:
        """Ingest a document, in the background; cancelled, what was ingested is kept."""
        documents = self.documents

        def add() -> Any:
            text = _text(given, caller.paths)
            return documents.add(caller.access, text, given.mode)

        upload = await run_in_threadpool(add)
        try:
            pause = 0.01
            while upload.active:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SECONDS_BETWEEN)
                if (at := upload.progress) is not None:
                    await progress(at.characters, at.total_characters)
        finally:
            documents.cancel(upload)
        if upload.error is not None:
            raise upload.error
        if upload.job.state == "cancelled":
            raise ApiError(503, "the server is stopping; ingest again to go on from there")
        return _row(await run_in_threadpool(documents.row, caller.access, given.name))

    async def forget(self, caller: Caller, given: Forget, progress: OnProgress) -> dict[str, Any]:
        """Delete a document."""
        await run_in_threadpool(self.documents.delete, caller.access, given.name)
        return {"forgotten": given.name}


def _text(given: Ingest, paths: Sequence[Path]) -> Text:
    """The text to ingest. Raises ApiError, InvalidInput."""
    if (given.text is None) == (given.path is None):
        raise InvalidInput("give either a text or a path")
    if given.path is None:
        assert given.text is not None
        return Text(given.text, given.name)
    text = Text(_allowed(given.path, paths), given.name)
    try:
        text.check()
    except InvalidInput as error:
        raise InvalidInput(str(error).replace(str(text.content), given.path)) from None
    return text


def _allowed(path: str, directories: Sequence[Path]) -> Path:
    """The file that a client names. Raises ApiError for one outside of these directories, whether
    it exists or not.
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


def _row(row: dict[str, Any]) -> dict[str, Any]:
    created = row["created"]
    since = None if created is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    return {name: row[name] for name in ("name", "state", "tokens", "bytes", "error")} | {
        "since": since
    }


Given = Any
"""The request of a tool."""
Run = Callable[[MemoryTools, Caller, Given, OnProgress], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Tool:
    """A tool: its description for the agent, its request, and the method that runs it."""

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
    "documents": Tool(
        "List the documents of the memory.", ListDocuments, MemoryTools.list_documents
    ),
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
