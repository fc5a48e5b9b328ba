"""An answer to a chat request: a question after earlier turns, the steps in which the model's
thread answers it in a session of its own, and the outcome.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from memstore.model.answer import Answer, refusal
from memstore.model.document_text import answer_sentence
from memstore.model.model_api import Chat
from memstore.model.session import Continuation, read_pending
from memstore.serve import trace_report
from memstore.serve.api_errors import ApiError


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

    def __init__(
        self,
        question: Question,
        open_chat: Callable[[Question], AbstractContextManager[Chat]],
        most_seconds: float,
        on_end: Callable[[Outcome, BaseException | None], None],
    ) -> None:
        """open_chat: a session of its own; most_seconds: of the answer; on_end: called on the
        model's thread when it has ended, with the error that ended it.
        """
        self.outcome = Outcome()
        self._question, self._open_chat = question, open_chat
        self._most_seconds, self._on_end = most_seconds, on_end
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
        question, outcome = self._question, self.outcome
        began = time.perf_counter()
        until = began + self._most_seconds
        failed: BaseException | None = None
        try:
            with self._open_chat(question) as chat:
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
            self._on_end(outcome, failed)

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
