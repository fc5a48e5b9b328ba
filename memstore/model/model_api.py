"""The Python API of every model: ingest documents into a store, search them, and ask about them in
one session or several at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from memstore.disk.format.document import Document
from memstore.errors import DocumentNotFound, InvalidInput
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import Answer, Found, Matches, Ranked, Source, sources_of
from memstore.model.lookup_settings import ANSWER_SETTINGS, AskOptions
from memstore.model.session import AskSession, Continuation, OnRead, Trace, attached, read_pending
from memstore.model.source_text import Ingesting, OnProgress, Text
from memstore.model.tokenizer import TokenText
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore, Names

Step = TypeVar("Step")
Result = TypeVar("Result")


class ModelAPI(ModelAdapter):
    """What every model does with a MemoryStore."""

    templated = False  # are questions written into a chat template, which may hold instructions?

    def check(self, store: MemoryStore) -> None:
        """Raises WrongModel if another selector wrote the memory."""

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
        """Ingest a document (a path, or a text with a name); idempotent, and resumes an interrupted
        ingest.

        mode: "new" refuses a name that other content has; "replace" replaces the content. lookup:
        LookupSettings that differ from the model's. Raises StorageFull; what was committed before
        that stays.
        """
        text = source if isinstance(source, Text) else Text(source, name)
        steps = self.ingesting(text, store, mode=mode, **lookup)
        return finish(steps, progress)

    @abstractmethod
    def ingesting(
        self, text: Text, store: MemoryStore, *, mode: Mode = "new", **lookup: Any
    ) -> Ingesting:
        """`ingest` one chunk at a time, for a caller with other work between the chunks."""

    @abstractmethod
    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build and save an approximate index of every document, for the queries of this model."""

    @abstractmethod
    def session(
        self,
        store: MemoryStore,
        documents: Names = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        **lookup: Any,
    ) -> AskSession:
        """A session that searches documents (None: every ready one, in the order of their
        creation).

        retrieve: look blocks up. on_read: called with what the last row of every step reads.
        lookup: LookupSettings that differ from the model's.
        """

    @abstractmethod
    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranked:
        """Blocks of documents (id, blocks), by similarity to a phrase, best first."""

    def ask(
        self,
        question: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        **options: Unpack[AskOptions],
    ) -> Answer:
        """Answer a question, read as typed, from the documents of a store, in a new session.

        Raises InvalidInput for an empty question, a setting out of range or no ready document,
        DocumentNotFound for an unknown one.
        """
        return finish(self.asking(question, store, documents=documents, **options))

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
        """`ask` each question in its own session, `together` sessions at once: each step reads the
        model's weights once for all. If two next tokens have nearly equal logits, an answer can
        differ from that of `ask`. Seconds and tiers of an answer are those of its batch.
        """
        if not isinstance(together, Integral) or together < 1:
            raise InvalidInput(f"together must be at least 1, is {together!r}")
        store.ready(documents, to="ask")
        lookup, answering = _split(options)
        answers: list[Answer] = []
        remaining = iter(questions)
        while some := list(islice(remaining, together)):
            with ExitStack() as stack:
                chats = [stack.enter_context(self.chat(store, documents, **lookup)) for _ in some]
                answers += _ask_together(chats, some, **answering)
        return answers

    @contextmanager
    def chat(self, store: MemoryStore, documents: Names = None, **lookup: Any) -> Iterator[Chat]:
        """Context with one session for several questions."""
        trace = Trace(self)
        with closing(self.session(store, documents, on_read=trace, **lookup)) as session:
            yield Chat(session, trace, documents)

    def search(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Names = None,
        top_k: int = 5,
        by: Literal["passage", "document"] = "passage",
    ) -> Matches:
        """The blocks most similar to a phrase, best first: docs/appendix/method.md section 9.

        by: "document" returns only the best block of each document. Raises InvalidInput for an
        empty phrase, a number below 1 or no ready document, DocumentNotFound.
        """
        _check_phrase("phrase", phrase)
        if not isinstance(top_k, Integral) or top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, is {top_k!r}")

        def found() -> Matches:
            searched = {document.id: document for document in store.ready(documents, to="search")}
            store.retrieval.hold_documents(searched.values())
            scope = [(document.id, document.blocks) for document in searched.values()]
            ranked, answered = self.ranked(phrase, store, scope)
            most = top_k if by == "passage" else min(top_k, sum(blocks > 0 for _, blocks in scope))
            sources = (
                Source.of(self, store, searched[one.document], one.block, one.weight)
                for one in islice(_best_of_each(ranked, by), most)
            )
            return Matches([source.with_sentence(phrase) for source in sources], answered)

        return _repeated(found)


class Chat:
    """Questions and answers in one session. Each question sees the earlier turns, and the documents
    that the memory has then.
    """

    def __init__(self, session: AskSession, trace: Trace, documents: Names = None) -> None:
        """trace: the session's OnRead. documents: those that the session searches."""
        self.session, self.trace = session, trace
        self._documents, self._asked = documents, False
        # generates the tokens of the last answer
        self.continuation: Continuation | None = None
        self.prompt_tokens = 0  # read before the first token of the last answer

    def ask(self, question: str, **settings: Any) -> Answer:
        """Continue the session with a question and generate its answer; settings: of
        AnswerSettings. Raises InvalidInput, DocumentNotFound (a named document was removed).
        """
        return finish(self.asking(question, **settings))

    def asking(self, question: str, **settings: Any) -> Generator[str, None, Answer]:
        """`ask` piece by piece: yields the text while it is generated, an empty piece for a token
        that completes no character, and returns the answer.
        """
        session, trace = self.session, self.trace
        reader, store = session.reader, session.store
        chosen = reader.answering.changed(**settings)
        _check_phrase("question", question)

        def read(work: Callable[[], Any]) -> Any:
            def attempt() -> Any:  # with the documents that the memory has now
                if self._asked:
                    session.attach(attached(store, self._documents, retrieve=True))
                self._asked = True
                return work()

            before = session.read_tokens
            return _repeated(attempt, lambda: session.read_tokens == before)

        trace.begin(session)
        with trace.step():
            last = None if self.continuation is None else self.continuation.last
            if last is not None:  # a token that no other followed
                read(partial(session.read_token, last))
            self.continuation = None
            state = read(partial(session.ask, question, trace.start))
        self.prompt_tokens = session.read_tokens
        said = Detokenizer(reader.tokenizer, stop=chosen.stop, sentence=chosen.until_sentence)
        silent = chosen.from_memory and not session.answered
        if not session.answered and not silent:
            with trace.step():
                alone = session.unread()
            if alone is not None:
                state = alone
                trace.start()  # what only judged the question is no source of the answer
        self.continuation = tokens = session.generate(
            state,
            0 if silent else chosen.max_new_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            seed=chosen.seed,
            logits=session.first_logits,
        )
        tokens.around = trace.step
        for token in trace.tokens_of(tokens):
            piece = said.add(token)
            if said.ended:
                tokens.stop()
            if piece and chosen.on_text:
                chosen.on_text(piece)
            yield piece
        if rest := said.rest():
            if chosen.on_text:
                chosen.on_text(rest)
            yield rest
        cut = tokens.stopped or len(said.tokens) == chosen.max_new_tokens
        most = chosen.max_sources
        if silent:
            sources = list[Source]()
            for document, block, score in session.closest:
                if len(sources) < most:
                    with suppress(DocumentNotFound):  # deleted since
                        found = store.document(document)
                        sources.append(Source.of(reader, store, found, block, score))
        else:
            sources = sources_of(trace, store, most, said.text, session.same)
        return Answer(
            text=said.text,
            tokens=said.tokens,
            sources=[source.with_sentence(question, said.text) for source in sources],
            lookups=trace.lookups,
            answered=session.answered,
            needed=session.needed,
            doubt=session.doubt,
            tiers=trace.tiers,
            seconds=trace.seconds,
            first_token_seconds=trace.first_token_seconds,
            finish_reason="length" if cut and not said.ended else "stop",
        )

    def stop(self) -> None:
        """End the answer in progress after the tokens that it has."""
        if self.continuation is not None:
            self.continuation.stop()


def finish(
    steps: Generator[Step, None, Result], progress: Callable[[Step], None] | None = None
) -> Result:
    """Take all steps of an ingest or an answer, and return its result. progress: called with each
    step.
    """
    with closing(steps):  # at once, and not when it is collected: an ingest holds the writer's lock
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            if progress is not None:
                progress(step)


def _repeated(
    search: Callable[[], Result], repeatable: Callable[[], bool] = lambda: True, tries: int = 5
) -> Result:
    """The result of a search, repeated while documents are deleted or replaced during it, `tries`
    times at most. Raises DocumentNotFound.
    """
    try:
        return search()
    except DocumentNotFound:
        if tries == 1 or not repeatable():
            raise
    return _repeated(search, repeatable, tries - 1)


def _check_phrase(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidInput(f"the {what} must be text, is {text!r}")
    if not text.strip():
        raise InvalidInput(f"the {what} is empty; write at least one word")


def _ask_together(chats: Sequence[Chat], questions: Sequence[str], **settings: Any) -> list[Answer]:
    """Continue each session with its question; settings: of AnswerSettings."""
    answers: dict[int, Answer] = {}
    going = {n: chat.asking(questions[n], **settings) for n, chat in enumerate(chats)}
    while going:
        for number, steps in list(going.items()):
            try:
                next(steps)
            except StopIteration as end:
                answers[number] = end.value
                del going[number]
        read_pending([one for number in going if (one := chats[number].continuation) is not None])
    return [answers[number] for number in range(len(chats))]


def _ends_sentence(piece: str) -> bool:
    """Whether a token of this text ends a sentence or a line."""
    return piece.rstrip(" ").endswith((".", "?", "!")) or "\n" in piece


class Detokenizer:
    """The text of tokens that are generated one by one, stripped.

    It holds back what a later token may complete or cut off: the first bytes of a character,
    trailing space, a full stop that ends the answer, the beginning of a stop text.
    """

    def __init__(
        self, tokenizer: TokenText, *, stop: Sequence[str] = (), sentence: bool = False
    ) -> None:
        """stop: texts that end the answer and are not part of it; sentence: end it after its first
        sentence or line.
        """
        self._tokenizer, self._stop, self._sentence = tokenizer, stop, sentence
        self.tokens: list[int] = []
        self.ended = False  # by a stop text, or by the end of a sentence
        self._text = ""  # of all tokens, up to a stop text, without the space before it
        self._sent = 0

    @property
    def text(self) -> str:
        """The whole text, if no token follows; without the first bytes of a character."""
        text = self._text.rstrip("\ufffd").strip()
        return text.removesuffix(".") if self._sentence else text

    def add(self, token: int) -> str:
        """Add a token; return the new text that can be sent."""
        self.tokens.append(token)
        self._text = self._tokenizer.decode(self.tokens).lstrip()
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.ended = self._text[: min(found)], True
            return self.rest()
        if self._sentence and self.text and _ends_sentence(self._tokenizer.decode([token])):
            self.ended = True
            return self.rest()
        return self._send(self._text[: len(self._text) - self._held(self._text)])

    def rest(self) -> str:
        """The text that was held back, if no token follows."""
        return self._send(self.text)

    def _send(self, text: str) -> str:
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece

    def _held(self, text: str) -> int:
        """Number of characters at the end of a text that must wait for the next token."""
        kept = text.rstrip("\ufffd").rstrip()
        if self._sentence:
            kept = kept.rstrip(".").rstrip()
        held = len(text) - len(kept)
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:size]):
                    held = size
                    break
        return held


def _best_of_each(found: Iterable[Found], by: str) -> Iterator[Found]:
    """The best block of each document, or all blocks."""
    documents: set[int] = set()
    for one in found:
        if by == "passage" or one.document not in documents:
            documents.add(one.document)
            yield one


def _split(options: AskOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into LookupSettings and AnswerSettings."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - AskOptions.__annotations__.keys()):
        known = ", ".join(AskOptions.__annotations__)
        raise InvalidInput(f"unknown setting {unknown[0]!r}; choose one of {known}")
    return given, {name: given.pop(name) for name in ANSWER_SETTINGS if name in given}
