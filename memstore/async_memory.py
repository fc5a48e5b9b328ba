"""The Python API for event loops: calls run on the memory's own thread, one after the other."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from memstore.disk.format.document import Document
from memstore.errors import InvalidInput, MemoryClosed
from memstore.memory import TOGETHER, AnswerStream, Labels, Memory, OnError, Progress, open_memory
from memstore.model.answer import Answer, Matches
from memstore.model.lookup_settings import AskOptions
from memstore.model.model_api import ModelAPI
from memstore.store.open_options import OpenOptions

if TYPE_CHECKING:
    from memstore.share.publish import Report as Published

P = ParamSpec("P")
T = TypeVar("T")


class AsyncMemory:
    """A Memory whose methods are awaited; an asynchronous context manager. Concurrent calls run one
    after the other.
    """

    def __init__(self, memory: Memory, thread: ThreadPoolExecutor) -> None:
        """Use `open_async`."""
        self.memory, self._thread, self._closed = memory, thread, False

    async def add(
        self,
        paths: Path | str | Iterable[Path | str] = (),
        *,
        text: str | None = None,
        name: str | None = None,
        labels: Labels | None = None,
        replace: bool = False,
        progress: Progress | None = None,
        on_error: OnError | None = None,
    ) -> list[Document]:
        """As Memory.add; progress and on_error are called on the memory's thread."""
        add = partial(self.memory.add, text=text, name=name, labels=labels, on_error=on_error)
        return await self._run(add, paths, replace=replace, progress=progress)

    async def ask(
        self,
        question: str,
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        **options: Unpack[AskOptions],
    ) -> Answer:
        """As Memory.ask."""
        ask = self.memory.ask
        return await self._run(ask, question, documents=documents, where=where, **options)

    async def ask_many(
        self,
        questions: Iterable[str],
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        together: int = TOGETHER,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """As Memory.ask_many."""
        ask = partial(self.memory.ask_many, together=together)
        return await self._run(ask, questions, documents=documents, where=where, **options)

    def stream(
        self,
        question: str,
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        **options: Unpack[AskOptions],
    ) -> "AsyncAnswerStream":
        """As Memory.stream, an asynchronous iterator and context manager; other calls take their
        turns between the pieces.
        """
        begin = partial(self.memory.stream, question, documents=documents, where=where, **options)
        return AsyncAnswerStream(begin, self._run)

    async def label(self, name: str, labels: Labels) -> Document:
        """As Memory.label."""
        return await self._run(self.memory.label, name, labels)

    async def publish(self, url: str, names: Sequence[str] | None = None) -> "Published":
        """As Memory.publish."""
        return await self._run(self.memory.publish, url, names)

    async def search(
        self,
        phrase: str,
        *,
        top_k: int = 5,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
    ) -> Matches:
        """As Memory.search."""
        search = self.memory.search
        return await self._run(search, phrase, top_k=top_k, documents=documents, where=where)

    async def documents(self, where: Labels | None = None) -> list[Document]:
        """As Memory.documents."""
        return await self._run(self.memory.documents, where)

    async def remove(self, *names: str, erase: bool = False) -> list[Document]:
        """As Memory.remove."""
        return await self._run(partial(self.memory.remove, *names, erase=erase))

    async def close(self) -> None:
        """Close the memory after the running call; idempotent."""
        if not self._closed:
            await self._run(self.memory.close)
            self._closed = True
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise MemoryClosed(f"{self.memory.store.place} is closed; open it again")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(call, *args, **kwargs))


class AsyncAnswerStream:
    """Pieces of an answer's text, never part of a character; `answer` is complete at the end."""

    def __init__(self, begin: Callable[[], AnswerStream], run: Callable[..., Any]) -> None:
        """Use AsyncMemory.stream."""
        self._begin, self._run = begin, run
        self._stream: AnswerStream | None = None

    @property
    def answer(self) -> Answer:
        """The answer with its sources. Raises InvalidInput before the last piece."""
        if self._stream is None:
            raise InvalidInput("the answer is complete after its last piece; read them all")
        return self._stream.answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._stream is None:
            self._stream = await self._run(self._begin)
        piece: str | None = await self._run(next, self._stream, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def close(self) -> None:
        """Stop generating."""
        if self._stream is not None:
            await self._run(self._stream.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def open_async(
    path: Path | str,
    model: ModelAPI | Path | str | None = None,
    *,
    device: str = "auto",
    dtype: str | None = None,
    weights: str = "auto",
    create: bool = True,
    options: OpenOptions | None = None,
) -> AsyncMemory:
    """As `memstore.open`, for an event loop."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="memstore")
    try:
        how: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "weights": weights,
            "create": create,
            "options": options,
        }
        call = partial(open_memory, path, model, **how)
        memory = await asyncio.get_running_loop().run_in_executor(thread, call)
    except BaseException:
        thread.shutdown(wait=False)
        raise
    return AsyncMemory(memory, thread)
