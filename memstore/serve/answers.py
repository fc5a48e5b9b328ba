"""Answers to chat requests: the question, the steps in which the model's thread answers it in a new
session, and the outcome with its sources and an optional trace of every token.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memstore.errors import DocumentNotFound
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import Answer, Source
from memstore.model.model_api import Chat
from memstore.model.passages.passage_session import PassageSession
from memstore.model.session import AskSession, BlockId, Continuation, TokenRead, Trace, read_pending
from memstore.serve.api_errors import ApiError
from memstore.store.memory_store import Names

_CUT = 3  # most tokens that continue one character
CANDIDATES = 12  # best candidates that a trace reports, besides the chosen passages

MayRead = Callable[[str], bool]
"""May the client see a document of this name?"""


@dataclass(frozen=True)
class Question:
    """A question after earlier turns, each (message of the user, answer). settings: fields of
    AnswerSettings. documents: those to search, looked up when the question is answered; trace:
    report the sources of every token; may_read: may the client see a document?
    """

    text: str
    settings: Mapping[str, Any]
    documents: Names
    turns: Sequence[tuple[str, str]] = ()
    trace: bool = False
    may_read: Callable[[str], bool] = lambda name: True


@dataclass
class Outcome:
    """The result of an answer that has ended."""

    text: str = ""
    refused: bool = False
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # without the time in the queue
    first_token_seconds: float = 0.0
    memstore: dict[str, Any] = field(default_factory=dict)  # the `memstore` field of the response

    @property
    def usage(self) -> dict[str, Any]:
        """The `usage` of a chat completion."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class QueuedAnswer(Iterator[str]):
    """The pieces of an answer's text, one for each step (Worker.steps), and its outcome."""

    def __init__(
        self,
        question: Question,
        open_chat: Callable[[Question], AbstractContextManager[Chat]],
        most_seconds: float,
        on_end: Callable[[Outcome, BaseException | None], None],
    ) -> None:
        """most_seconds: limit of the answer. on_end: called on the model's thread, with the error
        of a failed answer.
        """
        self.outcome = Outcome()
        self._question, self._open_chat = question, open_chat
        self._most_seconds, self._on_end = most_seconds, on_end
        self._chat: Chat | None = None
        self._steps = self._run()

    @property
    def continuation(self) -> Continuation | None:
        """The generation in progress, or None."""
        return None if self._chat is None else self._chat.continuation

    def __next__(self) -> str:
        return next(self._steps)

    def close(self) -> None:
        """End the answer now."""
        self._steps.close()

    def _run(self) -> Generator[str, None, None]:
        question, outcome = self._question, self.outcome
        began = time.perf_counter()
        until = began + self._most_seconds
        failed: BaseException | None = None
        try:
            with self._open_chat(question) as chat:
                self._chat = chat
                yield from self._read_turns(chat, until)
                answer = yield from self._generate(chat, until)
                shown = [one for one in answer.sources if question.may_read(one.document)]
                answer = replace(answer, sources=shown)
                outcome.text, outcome.refused = str(answer), answer.refused
                outcome.finish_reason = answer.finish_reason
                outcome.memstore = _report(question, chat, answer)
                if answer.refused:
                    yield outcome.text
        except BaseException as error:
            failed = error
            raise
        finally:
            self._chat = None
            outcome.seconds = time.perf_counter() - began
            self._on_end(outcome, failed)

    def _read_turns(self, chat: Chat, until: float) -> Generator[str, None, None]:
        """Read the earlier turns. until: time limit, of perf_counter. Raises ApiError."""
        for turn in self._question.turns:
            chat.session.tell(*turn)
            yield ""
            if time.perf_counter() > until:
                message = "the conversation takes too long to read; send fewer messages"
                raise ApiError(400, message, code="context_length_exceeded", param="messages")

    def _generate(self, chat: Chat, until: float) -> Generator[str, None, Answer]:
        """The pieces of the text, until the answer or its time ends."""
        steps = chat.asking(self._question.text, **self._question.settings)
        while True:
            try:
                piece = next(steps)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            self.outcome.prompt_tokens = chat.prompt_tokens
            self.outcome.completion_tokens = len(chat.trace.tokens)
            self.outcome.first_token_seconds = chat.trace.first_token_seconds
            yield piece
            if time.perf_counter() > until:
                chat.stop()


def decode_batch(works: Sequence[Iterator[Any]]) -> None:
    """Read the pending tokens of all answers in one forward pass, if the first work is an answer
    with a pending token. Worker calls it before each step.
    """
    going = [work.continuation for work in works if isinstance(work, QueuedAnswer)]
    others = [one for one in going[1:] if one is not None]
    first = going[0] if going and isinstance(works[0], QueuedAnswer) else None
    if first is not None and first.pending is not None and others:
        read_pending([first, *others])


def _report(question: Question, chat: Chat, answer: Answer) -> dict[str, Any]:
    """The `memstore` field of an answer with the sources that the client may see."""
    report: dict[str, Any] = {
        "answered": answer.answered,
        "needed": answer.needed,
        "doubt": answer.doubt,
        "sources": [source.citation for source in answer.sources],
    }
    if question.trace:
        trace, session, may_read = chat.trace, chat.session, question.may_read
        report |= report_trace(trace, session, answer.text, answer.sources, may_read)
    return report


# Traces


def report_trace(
    trace: Trace, session: AskSession, text: str, sources: Sequence[Source], may_read: MayRead
) -> dict[str, Any]:
    """The report of a traced answer: its sources with their tiers; the candidates and scores of a
    model that chooses once for a question; the sources of each token; and the costs.

    text: the answer, which is a part of the tokens' text: stripped, or cut at a stop text.
    Candidates that the client may not see, or that were deleted, are left out.
    """
    reader = trace.reader
    numbers = {(source.document, source.block): at for at, source in enumerate(sources)}
    number = dict[BlockId, int | None]()
    for document, block in trace.blocks:
        with suppress(DocumentNotFound):  # deleted concurrently
            number[document, block] = numbers.get((session.store.document(document).name, block))
    tokens = _tokens_of(text, trace)
    return {
        "reader": "landmarks" if reader.keeps is None else "choosing",
        "sources": [source.citation | {"tiers": sorted(source.tiers)} for source in sources],
        "choice": _choice(session, may_read),
        "tokens": [
            {
                "text": piece,
                "sources": [
                    [at, round(mass, 4)]
                    for block_id, mass in read.blocks
                    if (at := number.get(block_id)) is not None
                ],
            }
            for piece, read in tokens
        ],
        "lookups": dict(trace.lookups),
        "tiers": trace.tiers,
        "seconds": round(trace.seconds, 4),
        "model_seconds": round(trace.model_seconds, 4),
        "first_token_seconds": round(trace.first_token_seconds, 4),
    }


def pieces(reader: ModelAdapter, tokens: Sequence[int]) -> list[str]:
    """The text that begins in each token; joined, they are the text of all tokens."""
    whole = reader.tokenizer.whole_characters
    return [
        whole([token], tokens[number + 1 : number + 1 + _CUT])
        for number, token in enumerate(tokens)
    ]


def _tokens_of(text: str, trace: Trace) -> list[tuple[str, TokenRead]]:
    """The tokens of `text`, which is a part of all tokens' text, and the sources of each."""
    texts = pieces(trace.reader, [read.token for read in trace.tokens])
    begin = "".join(texts).find(text)
    if begin < 0:
        return list(zip(texts, trace.tokens))
    parts, at = [], 0
    for piece, read in zip(texts, trace.tokens):
        part = piece[max(0, begin - at) : max(0, begin + len(text) - at)]
        at += len(piece)
        if part:
            parts.append((part, read))
    return parts


def _choice(session: AskSession, may_read: MayRead) -> dict[str, Any] | None:
    """The last choice of a session that chooses once: best candidates and chosen passages."""
    if not isinstance(session, PassageSession) or session.candidates is None:
        return None
    candidates, store = session.candidates, session.store
    chosen = {(block.document, block.block): block for block in session.chosen}
    best = {(block.document, block.block): block for block in candidates.best(CANDIDATES)}
    ranked = sorted({**best, **chosen}.items(), key=lambda item: (-item[1].score, item[0]))
    rows = []
    for (number, block), one in ranked:
        with suppress(DocumentNotFound):  # deleted concurrently
            document = store.document(number)
            if may_read(document.name):
                source = Source.of(session.reader, store, document, block, one.score)
                is_chosen = (number, block) in chosen
                rows.append(source.citation | {"score": source.weight, "chosen": is_chosen})
    scores, needed = candidates.scores, session.needed
    return {
        "blocks": candidates.blocks,
        "confidence": round(float(scores.max()), 4) if len(scores) else None,
        "threshold": None if needed is None else round(needed, 4),
        "candidates": rows,
    }
