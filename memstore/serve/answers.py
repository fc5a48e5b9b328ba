"""Answers to chat requests: a question after earlier turns, the steps in which the model's thread
answers it, and the outcome.
"""

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from memstore.freed_memory import return_freed_memory
from memstore.model.answer import Answer, refusal
from memstore.model.document_text import answer_sentence
from memstore.model.model_api import Chat, ModelAPI
from memstore.model.session import Continuation, read_pending
from memstore.serve import trace_report
from memstore.serve.api_errors import ApiError
from memstore.serve.worker import Worker
from memstore.store.memory_store import MemoryStore

_FREED_EVERY = 64  # answers


@dataclass(frozen=True)
class Question:
    """A question after earlier turns, each a message of the user and what was answered. settings:
    of AnswerSettings. documents: gives the names of those to look in, when its turn comes; trace:
    report what every token read; may_read: may a document of this name be shown?
    """

    text: str
    settings: Mapping[str, Any]
    documents: Callable[[], Sequence[str]]
    turns: Sequence[tuple[str, str]] = ()
    trace: bool = False
    may_read: Callable[[str], bool] = lambda name: True


@dataclass
class Outcome:
    """What is known of an answer when it has ended."""

    text: str = ""
    answered: bool = True
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # from its turn to its end
    first_token_seconds: float = 0.0
    memstore: dict[str, Any] = field(default_factory=dict)  # the field of that name in answers

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of a chat completion."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class QueuedAnswer(Iterator[str]):
    """Pieces of an answer's text, one a step (some are empty); the outcome has the rest. For
    Worker.steps, which closes it where its client goes away.
    """

    def __init__(self, answers: "Answers", question: Question) -> None:
        self.outcome = Outcome()
        self._answers, self._question = answers, question
        self._chat: Chat | None = None
        self._steps = self._run()

    @property
    def continuation(self) -> Continuation | None:
        """What generates its tokens, while it does."""
        return None if self._chat is None else self._chat.continuation

    def __next__(self) -> str:
        return next(self._steps)

    def close(self) -> None:
        """End it now."""
        self._steps.close()

    def _run(self) -> Generator[str, None, None]:
        answers, question, outcome = self._answers, self._question, self.outcome
        began = time.perf_counter()
        until = began + answers.most_seconds
        failed: BaseException | None = None
        try:
            with answers.open_chat(question) as chat:
                self._chat = chat
                yield from self._read_turns(chat, until)
                answer = yield from self._generate(chat, until)
                outcome.text, outcome.answered = answer.text, answer.answered
                outcome.finish_reason = answer.finish_reason
                outcome.memstore = _report(question, chat, answer)
                if answer.refused:
                    shown = [one for one in answer.sources if question.may_read(one.document)]
                    outcome.text = refusal(shown, answer.needed)
                    yield outcome.text
        except BaseException as error:
            failed = error
            raise
        finally:
            self._chat = None
            outcome.seconds = time.perf_counter() - began
            answers.ended(outcome, failed)

    def _read_turns(self, chat: Chat, until: float) -> Generator[str, None, None]:
        """Read the earlier turns. until: the time, of perf_counter, by which that must end."""
        for turn in self._question.turns:
            chat.session.tell(*turn)
            yield ""
            if time.perf_counter() > until:
                message = "the conversation takes too long to read; send fewer messages"
                raise ApiError(400, message, code="context_length_exceeded", param="messages")

    def _generate(self, chat: Chat, until: float) -> Generator[str, None, Answer]:
        """The pieces of the text, until the answer ends or its time is over."""
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


class Answers:
    """Answers questions of one memory, several at once, a step of each in turn on the model's
    thread. Every question is read in a session of its own, with the turns before it.
    """

    def __init__(
        self,
        model: ModelAPI,
        store: MemoryStore,
        worker: Worker,
        *,
        at_once: int,
        most_seconds: float,
        on_end: Callable[[Outcome, BaseException | None], None],
    ) -> None:
        """at_once: how many the worker answers side by side; most_seconds: of one answer; on_end:
        called on the model's thread with every answer that ends, and the error that ended it.
        """
        self.model, self.most_seconds = model, most_seconds
        self._store, self._worker, self._on_end = store, worker, on_end
        self._count = 0  # of answers that have ended
        shape = model.shape
        # a passage is one unit of the tiers; a block is one in each layer and KV head
        units = shape.num_layers * shape.num_kv_heads if model.keeps is None else 1
        share = store.tiers.host.capacity // (2 * units * at_once)
        self._own_blocks = max(model.lookup.top_k, share)

    def begin(self, question: Question) -> tuple[AsyncGenerator[str, None], Outcome]:
        """Queue a question: the pieces of its answer, and its outcome, complete when they end.
        Raises Busy, Stopped.
        """
        answer = QueuedAnswer(self, question)
        return self._worker.steps(answer), answer.outcome

    def open_chat(self, question: Question) -> AbstractContextManager[Chat]:
        """A session that looks in the question's documents."""
        return self.model.chat(self._store, question.documents(), own_blocks=self._own_blocks)

    def ended(self, outcome: Outcome, error: BaseException | None) -> None:
        """An answer has ended; error: what ended it, if it failed or its client left."""
        self._count += 1
        if self._count % _FREED_EVERY == 0:  # of sessions that come and go glibc keeps the memory
            return_freed_memory()
        self._on_end(outcome, error)


def decode_batch(works: Sequence[Iterator[Any]]) -> None:
    """Read the pending tokens of all answers among these works in one forward pass, where the first
    of them has one. For Worker, before each step.
    """
    going = [work.continuation for work in works if isinstance(work, QueuedAnswer)]
    others = [one for one in going[1:] if one is not None]
    first = going[0] if going and isinstance(works[0], QueuedAnswer) else None
    if first is not None and first.pending is not None and others:
        read_pending([first, *others])


def _report(question: Question, chat: Chat, answer: Answer) -> dict[str, Any]:
    """The `memstore` field of the answer."""
    may_read = question.may_read
    report: dict[str, Any] = {
        "answered": answer.answered,
        "needed": answer.needed,
        "doubt": answer.doubt,
        "sources": [source.citation for source in answer.sources if may_read(source.document)],
    }
    if question.trace:
        most = question.settings["max_sources"]
        traced = trace_report.report(
            chat.trace, chat.session, text=answer.text, most=most, may_read=may_read
        )
        if answer.refused:
            traced["sources"] = [{**source, "tiers": []} for source in report["sources"]]
        report |= traced
    for source in report["sources"]:
        source["sentence"] = answer_sentence(source["text"], question.text, answer.text)
    return report
