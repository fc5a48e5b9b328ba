"""The verbs of a reader: ingest documents into a store, ask about them, search them, and see what
was read.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.errors import InvalidInput
from memstore.model.adapter import Reader
from memstore.model.answer import Answer, Collector, DocumentMatch, Found, Matches, Source
from memstore.model.document_ingest import Ingesting, OnForecast, OnProgress, finish
from memstore.model.generation import Continuation, ends_sentence
from memstore.model.landmark.attention.block_requests import Lookups, OnRead
from memstore.model.lookup_settings import ANSWER_SETTINGS
from memstore.model.passages.worker_pool import Workers
from memstore.model.texts.detokenizer import Said
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.tiers.stats import COUNTS

SHORTLIST = 1 << 16
"""Blocks whose own keys are read in a search, by default; a smaller memory is ranked whole."""


class AskingSession(AbstractContextManager["AskingSession"], Protocol):
    """A session as a chat uses it: ScratchSession, or ChoosingSession."""

    store: MemoryStore
    answered: bool  # False: nothing in the memory answers the last question
    read_tokens: int  # since it was opened

    @property
    def same(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """Of blocks (document, block) that are read now, others that say the same."""

    @property
    def absent(self) -> set[int]:
        """Documents that were left out, or of which blocks were, since they could not be had."""

    @property
    def lookups(self) -> Lookups:
        """How often blocks were looked for."""

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question; the state [hidden_size] that its answer begins with. answering: called
        before that state is computed.
        """

    def tell(self, question: str, answer: str) -> int:
        """Read a turn that was said before, without looking up; how many tokens it has."""

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> states [n, hidden_size]."""

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary]."""

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
    ) -> Continuation:
        """The tokens that follow `state`."""


class Verbs(Reader):
    """What any reader can do with a MemoryStore; a reader inherits them."""

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
        expect: OnForecast | None = None,
        **lookup: Any,
    ) -> Document:
        """Read a document (a path, or a text with a name) into the store; idempotent, and resumed
        where it was interrupted.

        mode: "new" refuses a name already used with other content; "append" continues the document;
        "replace" swaps it. expect: told, before any of it is read, about how large it will be;
        not where it is there already. lookup: LookupSettings that shall differ. Raises StorageFull
        for a document that finds no room, before it is read.
        """
        steps = self.ingesting(source, store, name=name, mode=mode, expect=expect, **lookup)
        return finish(steps, progress)

    @abstractmethod
    def ingesting(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        expect: OnForecast | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """`ingest` one chunk at a time, for who has other work to do between them."""

    def workers(self, number: int) -> Workers:
        """Processes that compute what `ingest` needs, for one document after the other. Raises
        InvalidInput for a model whose documents cannot be read in by several.
        """
        raise InvalidInput(
            "this model's blocks are computed in turn, by one process; leave workers out"
        )

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
    ) -> AskingSession:
        """A session that has attached documents (None = every ready one, in the order they were
        created).

        retrieve: look blocks up. on_read: told what the last row of every step reads. lookup:
        LookupSettings that shall differ from the reader's.
        """

    @abstractmethod
    def ranked(
        self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]], shortlist: int
    ) -> Iterator[Found]:
        """Blocks of documents (id, blocks) where most of the phrase is found, best first."""

    def ask(
        self,
        question: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        **settings: Any,
    ) -> Answer:
        """Answer a question, taken as typed, from the documents of a store, in a fresh session.

        settings: of AnswerSettings (max_new_tokens, temperature, ..) and of LookupSettings (top_k,
        ..). Raises InvalidInput for an empty question, a setting out of range or no ready document,
        DocumentNotFound for an unknown one.
        """
        store.ready(documents, to="ask")
        answering = {name: settings.pop(name) for name in ANSWER_SETTINGS if name in settings}
        with self.chat(store, documents, **settings) as chat:
            return chat.ask(question, **{"from_memory": True, **answering})

    @contextmanager
    def chat(
        self, store: MemoryStore, documents: Sequence[str] | None = None, **lookup: Any
    ) -> Iterator["Chat"]:
        """A session that stays warm over several questions."""
        collector = Collector()
        with self.session(store, documents, on_read=collector, **lookup) as session:
            yield Chat(self, session, collector)

    def search(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        top_k: int = 5,
        shortlist: int = SHORTLIST,
    ) -> Matches[Source]:
        """The blocks where most of the phrase is found, best first: docs/method.md section 9.

        shortlist: blocks that the landmark keys choose to be compared with the phrase word by word;
        more is slower. Raises InvalidInput for an empty phrase, a number below 1 or no ready
        document, DocumentNotFound.
        """
        searched, found, absent = self._found(phrase, store, documents, top_k, shortlist)
        best = (self._source(store, searched, block) for block in islice(found, top_k))
        return Matches(best, absent)

    def search_documents(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        top_k: int = 5,
        shortlist: int = SHORTLIST,
    ) -> Matches[DocumentMatch]:
        """The documents where most of the phrase is found in one block, best first; otherwise as
        `search`.
        """
        searched, found, absent = self._found(phrase, store, documents, top_k, shortlist)
        best: dict[int, Source] = {}
        for block in found:
            if block.document not in best:
                best[block.document] = self._source(store, searched, block)
                if len(best) == min(top_k, len(searched)):
                    break
        matches = (
            DocumentMatch(source.document, source.weight, source) for source in best.values()
        )
        return Matches(matches, absent)

    def _found(
        self,
        phrase: str,
        store: MemoryStore,
        documents: Sequence[str] | None,
        top_k: int,
        shortlist: int,
    ) -> tuple[dict[int, Document], Iterator[Found], list[str]]:
        _check_said("phrase", phrase)
        for name, value in (("top_k", top_k), ("shortlist", shortlist)):
            if not isinstance(value, Integral) or value < 1:
                raise InvalidInput(f"{name} must be at least 1, is {value!r}")
        wanted = store.ready(documents, to="search")
        searched = {document.id: document for document in store.attached(wanted)}
        absent = [document.name for document in wanted if document.id not in searched]
        scope = [(document.id, document.blocks) for document in searched.values()]
        return searched, self.ranked(phrase, store, scope, max(shortlist, top_k)), absent

    def _source(self, store: MemoryStore, searched: dict[int, Document], block: Found) -> Source:
        document = searched[block.document]
        return Source.of(self, store, document, block.block, block.reads, block.weight)

    def score(self, session: AskingSession, ids: Sequence[int]) -> np.ndarray:
        """Log probabilities [n - 1] of ids[1:], each after what stands before it in the session."""
        states = session.feed(list(ids[:-1]))
        logits = session.logits(states).log_softmax(-1)
        following = torch.tensor(ids[1:], device=logits.device)
        return logits.gather(-1, following[:, None])[:, 0].double().cpu().numpy()


def _check_said(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidInput(f"the {what} must be text, is {text!r}")
    if not text.strip():
        raise InvalidInput(f"the {what} is empty")


class Chat:
    """Questions and answers in one session: each sees what was said before, and the same
    documents.
    """

    def __init__(self, reader: Reader, session: AskingSession, collector: Collector) -> None:
        self._reader, self._session, self._collector = reader, session, collector

    def ask(self, question: str, **settings: Any) -> Answer:
        """Continue the session with a question and generate its answer; settings: of
        AnswerSettings. Raises InvalidInput.
        """
        asking = self.asking(question, **settings)
        while True:
            try:
                next(asking)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def asking(self, question: str, **settings: Any) -> Generator[str, None, Answer]:
        """`ask` piece by piece: yields the text as it is generated, and returns the answer."""
        chosen = self._reader.answering.changed(**settings)
        _check_said("question", question)
        session, store, tokenizer = self._session, self._session.store, self._reader.tokenizer
        began, tiers = time.perf_counter(), store.tier_stats()
        lookups = session.lookups
        done, skipped = lookups.done, lookups.skipped
        self._collector.stop()
        state = session.ask(question, self._collector.start)
        said = Said(tokenizer, sentence=chosen.until_sentence)
        first = 0.0
        silent = chosen.from_memory and not session.answered
        for token in session.generate(
            state,
            0 if silent else chosen.max_new_tokens,
            temperature=chosen.temperature,
            seed=chosen.seed,
            stop=self._ends_answer if chosen.until_sentence else None,
        ):
            first = first or time.perf_counter() - began
            if chosen.on_token is not None:
                chosen.on_token(tokenizer.decode([token]))
            if piece := said.add(token):
                yield piece
        if rest := said.rest():
            yield rest
        after, seconds = store.tier_stats(), time.perf_counter() - began
        store.store_computed()
        return Answer(
            text=said.text,
            tokens=said.tokens,
            sources=self._collector.sources(self._reader, store, chosen.max_sources, session.same),
            lookups={"done": lookups.done - done, "skipped": lookups.skipped - skipped},
            answered=session.answered,
            tiers={
                name: {count: after[name][count] - counts[count] for count in COUNTS}
                for name, counts in tiers.items()
            },
            absent=[row.name for row in store.documents() if row.id in session.absent],
            seconds=seconds,
            first_token_seconds=first,
        )

    def _ends_answer(self, token: int) -> bool:
        return ends_sentence(self._reader.tokenizer.decode([token]))
