"""The Python API of every model: ingest documents into a store, ask about them, search them, and
see what was read.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch

from memstore.disk.format.document import Document
from memstore.errors import InvalidInput
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import Answer, Found, Matches, Ranking, Source
from memstore.model.chat_session import Chat, ask_together, check_phrase, finished
from memstore.model.document_ingest import Ingesting, OnProgress, finish
from memstore.model.lookup_settings import ANSWER_SETTINGS, AskOptions
from memstore.model.read_trace import Trace
from memstore.model.session import AskSession, OnRead
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode


class ModelAPI(ModelAdapter):
    """What any model can do with a MemoryStore."""

    @property
    def templated(self) -> bool:
        """Are questions written into a chat template, which may hold instructions?"""
        return False

    def ingest(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        progress: OnProgress | None = None,
        **lookup: Any,
    ) -> Document:
        """Read a document (a path, or a text with a name) into the store; idempotent, and resumed
        where it was interrupted.

        mode: "new" refuses a name already used with other content; "replace" swaps it.
        lookup: LookupSettings that shall differ. Raises StorageFull; what was read before that is
        kept.
        """
        steps = self.ingesting(source, store, name=name, mode=mode, **lookup)
        return finish(steps, progress)

    @abstractmethod
    def ingesting(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        **lookup: Any,
    ) -> Ingesting:
        """`ingest` one chunk at a time, for who has other work to do between them."""

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build and save an approximate index of every document, for the queries of this reader.
        Raises InvalidInput for a reader whose memories need none.
        """
        raise InvalidInput("memories of this model are searched exactly; there is nothing to build")

    @abstractmethod
    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        **lookup: Any,
    ) -> AskSession:
        """A session that has attached documents (None = every ready one, in the order they were
        created).

        retrieve: look blocks up. on_read: told what the last row of every step reads. lookup:
        LookupSettings that shall differ from the reader's.
        """

    @abstractmethod
    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranking:
        """Blocks of documents (id, blocks) where most of the phrase is found, best first."""

    def ask(
        self,
        question: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        **options: Unpack[AskOptions],
    ) -> Answer:
        """Answer a question, taken as typed, from the documents of a store, in a fresh session.

        Raises InvalidInput for an empty question, a setting out of range or no ready document,
        DocumentNotFound for an unknown one.
        """
        return finished(self.asking(question, store, documents=documents, **options))

    def asking(
        self,
        question: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        **options: Unpack[AskOptions],
    ) -> Generator[str, None, Answer]:
        """`ask` piece by piece: see Chat.asking."""
        store.ready(documents, to="ask")
        lookup, answering = _split(options)
        with self.chat(store, documents, **lookup) as chat:
            return (yield from chat.asking(question, **answering))

    def ask_many(
        self,
        questions: Iterable[str],
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        together: int = 8,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """`ask` each question in a session of its own, `together` of them side by side: the model's
        weights are read once a step for all. An answer whose next token is nearly a draw can differ
        from the one that is asked alone. Seconds and tiers are told of those side by side together.
        """
        if together < 1:
            raise InvalidInput(f"together must be at least 1, is {together!r}")
        store.ready(documents, to="ask")
        lookup, answering = _split(options)
        answers: list[Answer] = []
        remaining = iter(questions)
        while some := list(islice(remaining, together)):
            with ExitStack() as stack:
                chats = [stack.enter_context(self.chat(store, documents, **lookup)) for _ in some]
                answers += ask_together(chats, some, **answering)
        return answers

    @contextmanager
    def chat(
        self, store: MemoryStore, documents: Sequence[str] | None = None, **lookup: Any
    ) -> Iterator[Chat]:
        """A session that stays warm over several questions."""
        trace = Trace(self)
        with self.session(store, documents, on_read=trace, **lookup) as session:
            yield Chat(self, session, trace, documents)

    def search(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        top_k: int = 5,
        by: Literal["passage", "document"] = "passage",
    ) -> Matches:
        """The blocks where most of the phrase is found, best first: docs/appendix/method.md section
        9.

        by: "document" returns only the best block of each document. Raises InvalidInput for an
        empty phrase, a number below 1 or no ready document, DocumentNotFound.
        """
        check_phrase("phrase", phrase)
        if not isinstance(top_k, Integral) or top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, is {top_k!r}")
        searched = {document.id: document for document in store.ready(documents, to="search")}
        store.retrieval.hold_documents(searched.values())
        scope = [(document.id, document.blocks) for document in searched.values()]
        ranking = self.ranked(phrase, store, scope)
        sources = [
            Source.of(self, store, searched[one.document], one.block, one.reads, one.weight)
            for one in islice(_best_of_each(ranking.found, by), top_k)
        ]
        return Matches(sources, ranking.answered)

    def score(self, session: AskSession, ids: Sequence[int]) -> np.ndarray:
        """Log probabilities [n - 1] of ids[1:], each after what is before it in the session."""
        logits = session.logits(session.feed(list(ids[:-1]))).log_softmax(-1)
        following = torch.tensor(ids[1:], device=logits.device)
        return logits.gather(-1, following[:, None])[:, 0].double().cpu().numpy()


def _best_of_each(found: Iterable[Found], by: str) -> Iterator[Found]:
    """The best block of each document, or all blocks."""
    documents: set[int] = set()
    for one in found:
        if by == "passage" or one.document not in documents:
            documents.add(one.document)
            yield one


def _split(options: AskOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """LookupSettings, and AnswerSettings."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - AskOptions.__annotations__.keys()):
        known = ", ".join(AskOptions.__annotations__)
        raise InvalidInput(f"unknown setting {unknown[0]!r}; choose one of {known}")
    answering = {name: given.pop(name) for name in ANSWER_SETTINGS if name in given}
    return given, answering
