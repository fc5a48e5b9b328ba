"""Answers: what is asked, the steps in which the model's thread generates one, and its outcome."""

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memstore.errors import DocumentNotFound
from memstore.model.answer import Source, closest_sources, refusal
from memstore.model.model_api import ModelAPI
from memstore.model.session import Continuation
from memstore.model.texts.detokenizer import Detokenizer
from memstore.serve.answering import trace_report
from memstore.serve.answering.long_prompts import Plan
from memstore.serve.answering.sampling import Sampling
from memstore.serve.answering.warm_sessions import WarmSession, WarmSessions
from memstore.serve.answering.worker import Worker
from memstore.serve.state.conversations import Conversation, Conversations
from memstore.serve.state.turns import Turn

if TYPE_CHECKING:
    from torch import Tensor

_TIMES_ANEW = 2  # that an answer is begun anew because a document was forgotten


@dataclass(frozen=True)
class Question:
    """What is asked: `text`, after `turns`, of these documents."""

    text: str
    sampling: Sampling
    documents: Sequence[str]
    all_documents: Callable[[], Sequence[str]] | None = None  # names, where every one is asked
    owner: str = "local"  # whose conversation it is
    turns: Sequence[Turn] = ()
    plan: Plan | None = None  # of how a long one is read, where it is made already
    conversation: Conversation | None = None  # that goes on with it, as it stands
    keep: bool = True  # store the turn
    operation: str = "chat"  # as telemetry calls it
    max_sources: int = 5
    trace: bool = False  # tell all of what was read, by token and head
    may_read: Callable[[str], bool] = lambda name: True  # may this document be shown?
    from_memory: bool = True  # refuse where the gate finds no answer in the memory


@dataclass
class Outcome:
    """What is known of an answer when it is made."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answered: bool = True
    refused: bool = False  # the text says so, and the sources are the closest passages
    key: bytes = b""  # of the turn, if it is stored
    sources: list[Source] = field(default_factory=list)  # that may be shown, best first
    read: float = 0.0  # the weight of all blocks of documents that it read
    began_ns: int = 0  # of the clock, when its turn came
    seconds: float = 0.0  # from then to its end
    first_token_seconds: float = 0.0
    memstore: dict[str, Any] = field(default_factory=dict)  # the field of that name in answers

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of a chat completion."""
        completion = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
        }


class Answer(Iterator[str]):
    """Pieces of an answer's text, a step each (some of them empty); the outcome has the rest.
    Closed before its end, it lets its session go. For Worker.steps.

    continuation: what generates its tokens, while it does; outcome: what is known of it in the end.
    """

    def __init__(self, answers: "Answers", question: Question) -> None:
        self.continuation: Continuation | None = None
        self.outcome = Outcome()
        self._answers, self._question = answers, question
        self._steps = self._run()

    def __next__(self) -> str:
        return next(self._steps)

    def close(self) -> None:
        """End it where it is."""
        self._steps.close()

    def _run(self) -> Generator[str, None, None]:
        """All steps: open a session, generate in it, keep the turn, whatever happens."""
        answers, question, outcome = self._answers, self._question, self.outcome
        began = time.perf_counter()
        outcome.began_ns = time.time_ns()
        failed: BaseException | None = None
        try:
            with answers.conversations.continuing(question.owner, question.conversation):
                warm, state = yield from self._open()
                try:
                    read = warm.session.read_tokens
                    until = began + answers.most_seconds
                    detokenizer = yield from self._generate(warm, state, until)
                    _report(question, warm, outcome)
                    if outcome.refused:
                        outcome.text = refusal(outcome.sources, warm.session.needed)
                        yield outcome.text
                    self._keep(warm, detokenizer, read)
                except BaseException:
                    warm.close()
                    raise
                yield detokenizer.rest()
        except BaseException as error:
            failed = error
            raise
        finally:
            self.continuation = None
            outcome.seconds = time.perf_counter() - began
            answers.on_end(question, outcome, failed)

    def _open(self) -> Generator[str, None, tuple[WarmSession, "Tensor"]]:
        """A session that has read the question, and the state behind it; where every document is
        asked and one is forgotten meanwhile, it is begun anew with those that are left.
        """
        question = self._question
        documents, left = question.documents, _TIMES_ANEW
        while True:
            warm: WarmSession | None = None
            try:
                warm = yield from self._answers.sessions.begin(
                    question.owner, question.turns, question.text, documents, question.plan
                )
                warm.trace.begin(warm.session)
                with warm.trace.step():
                    return warm, warm.session.ask(warm.question, warm.trace.start)
            except BaseException as error:
                if warm is not None:
                    warm.close()
                if (
                    not isinstance(error, DocumentNotFound)
                    or question.all_documents is None
                    or not left
                ):
                    raise
                documents, left = question.all_documents(), left - 1

    def _generate(
        self, warm: WarmSession, state: "Tensor", until: float
    ) -> Generator[str, None, Detokenizer]:
        """The pieces of the text but the last; what holds that one. until: of time.perf_counter,
        when the answer ends where it is.
        """
        session, trace, outcome = warm.session, warm.trace, self.outcome
        sampling = self._question.sampling
        outcome.prompt_tokens, outcome.cached_tokens = warm.prompt_tokens, warm.cached_tokens
        outcome.answered = session.answered
        detokenizer = sampling.detokenizer(self._answers.reader.tokenizer)
        outcome.refused = self._question.from_memory and not session.answered
        self.continuation = session.generate(
            state,
            0 if outcome.refused else sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=lambda token: detokenizer.ended,
        )
        self.continuation.around = trace.step
        late = False
        for token in trace.tokens_of(self.continuation):
            outcome.tokens = detokenizer.tokens
            outcome.first_token_seconds = trace.first_token_seconds
            yield detokenizer.add(token)
            late = time.perf_counter() > until
            if late:
                break
        trace.stop()
        outcome.text = detokenizer.text
        cut = late or len(detokenizer.tokens) == sampling.max_new_tokens
        outcome.finish_reason = "length" if cut and not detokenizer.ended else "stop"
        return detokenizer

    def _keep(self, warm: WarmSession, detokenizer: Detokenizer, read: int) -> None:
        """Store the turn, and have the session wait for the next one where it read all of this.
        read: how many tokens the session had read before the answer.
        """
        question, outcome, session = self._question, self.outcome, warm.session
        if question.keep:
            turn = Turn(question.text, outcome.text)
            outcome.key = self._answers.conversations.add_turn(
                question.owner, question.turns, turn, warm.documents, question.conversation
            )
        if not outcome.key or detokenizer.cut or outcome.refused:  # it has not read the refusal
            warm.close()
            return
        if outcome.finish_reason == "length":  # the last token was not asked behind
            unread = read + len(detokenizer.tokens) - session.read_tokens
            session.feed(detokenizer.tokens[len(detokenizer.tokens) - unread :])
        self._answers.sessions.end(warm, outcome.key)


class Answers:
    """Answers questions of one memory, many at once, each a step in turn on the model's thread."""

    def __init__(
        self,
        reader: ModelAPI,
        sessions: WarmSessions,
        conversations: Conversations,
        worker: Worker,
        *,
        most_seconds: float,
        on_end: Callable[[Question, Outcome, BaseException | None], None],
    ) -> None:
        """most_seconds: of one answer; on_end: called with every answer that ends, on the model's
        thread, and with the error that ended it.
        """
        self.reader, self.sessions, self.conversations = reader, sessions, conversations
        self.most_seconds, self.on_end = most_seconds, on_end
        self._worker = worker

    def begin(self, owner: str, question: Question) -> tuple[AsyncGenerator[str, None], Outcome]:
        """Have a question take its turns: the pieces of its answer, and what is known of it in the
        end. owner: as Worker.steps takes it. Raises Busy, Stopped.
        """
        answer = Answer(self, question)
        return self._worker.steps(owner, answer), answer.outcome


def _report(question: Question, warm: WarmSession, outcome: Outcome) -> None:
    """Fill in what an outcome says of the sources."""
    most, trace, may_read = question.max_sources, warm.trace, question.may_read
    if outcome.refused:
        found = closest_sources(trace.reader, warm.session, most)
    else:
        found = trace_report.sources(trace, warm.session.store, most)
    outcome.sources = [source for source in found if may_read(source.document)]
    outcome.read = sum(block.mass for block in trace.blocks.values())
    shown = ("document", "block", "span", "place", "text", "weight")
    sources = [{name: getattr(source, name) for name in shown} for source in outcome.sources]
    if question.trace:
        outcome.memstore = trace_report.report(
            trace, warm.session, text=outcome.text, most=most, may_read=may_read
        )
        if outcome.refused:
            outcome.memstore["sources"] = [{**source, "tiers": {}} for source in sources]
        return
    outcome.memstore = {
        "answered": outcome.answered,
        "needed": warm.session.needed,
        "absent": trace_report.absent(warm.session, may_read),
        "sources": sources,
    }
