"""One answer being made: the steps that the model's thread takes, and what is known of it then."""

import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memstore.errors import DocumentNotFound
from memstore.model.answer import Source
from memstore.model.generate import Continuation
from memstore.model.together import read_pending
from memstore.serve.answering import trace_report
from memstore.serve.answering.long_prompts import Plan
from memstore.serve.answering.sampling import Sampling, ends, said_by
from memstore.serve.answering.warm_sessions import Warm
from memstore.serve.api_errors import ApiError
from memstore.serve.state.conversations import Conversation
from memstore.serve.state.turns import Turn, keys_of

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.serve.service import Service

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
    keep: bool = True  # store what was said
    operation: str = "chat"  # as telemetry calls it
    max_sources: int = 5
    trace: bool = False  # tell all of what was read, by token and head
    may_read: Callable[[str], bool] = lambda name: True  # may this document be shown?
    from_memory: bool = False  # say nothing where nothing in the memory answers

    @property
    def keys(self) -> Sequence[bytes]:
        """Of what was said before."""
        return keys_of(self.owner, self.turns) if self.plan is None else self.plan.keys


@dataclass
class Outcome:
    """What is known of an answer when it is made."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answered: bool = True
    key: bytes = b""  # of all that was said now, if it is stored
    sources: list[Source] = field(default_factory=list)  # that may be shown, best first
    read: float = 0.0  # the weight of all blocks of documents that it read
    began_ns: int = 0  # of the clock, when its turn came
    seconds: float = 0.0  # from then to its end
    first_token_seconds: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)  # the `memstore` field of answers

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


class Answering(Iterator[str]):
    """Pieces of an answer's text, a step each (some of them empty); the outcome is told the rest.
    Closed before its end, it lets its session go. For Worker.steps.

    continuation: what generates its tokens, while it does; outcome: what is told the rest.
    """

    def __init__(self, service: "Service", question: Question, outcome: Outcome) -> None:
        self.continuation: Continuation | None = None
        self.outcome = outcome
        self._service, self._question = service, question
        self._steps = self._answer()

    def __next__(self) -> str:
        return next(self._steps)

    def close(self) -> None:
        """End it where it is."""
        self._steps.close()

    def _begin(self) -> Generator[str, None, tuple[Warm, "Tensor"]]:
        """A session that has read the question, and the state behind it; where every document is
        asked and one is forgotten meanwhile, it is begun anew with those that are left.
        """
        service, question = self._service, self._question
        documents, left = question.documents, _TIMES_ANEW
        while True:
            warm: Warm | None = None
            try:
                warm = yield from service.sessions.begin(
                    question.owner, question.turns, question.text, documents, question.plan
                )
                warm.trace.begin(warm.session)
                with warm.trace.step():
                    return warm, warm.session.ask(warm.question, warm.trace.start)
            except BaseException as error:
                if warm is not None:
                    warm.close()
                gone = isinstance(error, DocumentNotFound) and question.all_documents is not None
                if not gone or not left:
                    raise
                assert question.all_documents is not None
                documents, left = question.all_documents(), left - 1

    def _answer(self) -> Generator[str, None, None]:
        service, question, outcome = self._service, self._question, self.outcome
        began, sampling = time.perf_counter(), question.sampling
        outcome.began_ns = time.time_ns()
        warm: Warm | None = None
        failed: BaseException | None = None
        held = ExitStack()
        try:
            held.enter_context(_alone(service, question))
            warm, state = yield from self._begin()
            session, trace = warm.session, warm.trace
            asked = session.read_tokens
            outcome.prompt_tokens, outcome.cached_tokens = warm.prompt_tokens, warm.cached_tokens
            outcome.answered = session.answered
            said = said_by(service.reader.tokenizer, sampling)
            silent = question.from_memory and not session.answered
            self.continuation = session.generate(
                state,
                0 if silent else sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                stop=ends(said),
            )
            self.continuation.around = trace.step
            until, late = began + service.settings.answer_seconds, False
            for token in trace.tokens_of(self.continuation):
                outcome.tokens = said.tokens
                outcome.first_token_seconds = trace.first_token_seconds
                yield said.add(token)
                late = time.perf_counter() > until
                if late:
                    break
            trace.stop()
            outcome.text = said.text
            cut = late or len(said.tokens) == sampling.max_new_tokens
            outcome.finish_reason = "length" if cut and not said.ended else "stop"
            outcome.told = _told(service, question, warm, outcome)
            if question.keep:
                outcome.key = _keep(service, question, warm.documents, outcome.text)
                if outcome.key and not said.cut:
                    if outcome.finish_reason == "length":  # the last token was not asked behind
                        unread = asked + len(said.tokens) - session.read_tokens
                        session.feed(said.tokens[len(said.tokens) - unread :])
                    service.sessions.end(warm, outcome.key)
                    warm = None  # it is kept
            yield said.rest()
            service.store.store_computed()
        except BaseException as error:
            failed = error
            raise
        finally:
            self.continuation = None
            held.close()
            outcome.seconds = time.perf_counter() - began
            service.telemetry.ended(question, outcome, failed)
            if warm is not None:
                warm.close()


def begin(
    service: "Service", owner: str, question: Question
) -> tuple[AsyncGenerator[str, None], Outcome]:
    """Have a question take its turns: the pieces of its answer, and what is told of it in the end.
    owner: as Worker.steps takes it. Raises Busy, Stopped.
    """
    outcome = Outcome()
    return service.worker.steps(owner, Answering(service, question, outcome)), outcome


def read_ahead(works: Sequence[Iterator[Any]]) -> None:
    """Read the tokens that answers have given and not read yet in one walk through the model, where
    the first of these works waits for one. For Worker.
    """
    going = [work.continuation for work in works if isinstance(work, Answering)]
    others = [one for one in going[1:] if one is not None]
    first = going[0] if going and isinstance(works[0], Answering) else None
    if first is not None and first.pending is not None and others:
        read_pending([first, *others])


@contextmanager
def _alone(service: "Service", question: Question) -> Iterator[None]:
    """Nobody else goes on with its conversation meanwhile, of which one turn would be lost. Raises
    ApiError: 409 where somebody does, or did; 404 where it was forgotten.
    """
    owner, conversation = question.owner, question.conversation
    if conversation is None:
        yield
        return
    who = owner, conversation.id
    stands = service.conversations.get(owner, conversation.id).head == conversation.head
    if who in service.conversing or not stands:
        raise ApiError(
            409,
            f"another request goes on with conversation {conversation.id!r}; ask again when it is "
            "answered",
            code="conversation_locked",
        )
    service.conversing[who] = threading.Event()
    try:
        yield
    finally:
        del service.conversing[who]


def _keep(service: "Service", question: Question, documents: Sequence[str], answer: str) -> bytes:
    """Store what was said; its key, or none where its conversation was forgotten meanwhile."""
    conversations, conversation = service.conversations, question.conversation
    with service.database.transaction():
        if conversation is not None and (
            service.conversing[question.owner, conversation.id].is_set()
            or not conversations.stands(question.owner, conversation)
        ):
            return b""
        keys = question.keys
        service.tree.add_all(question.owner, question.turns, keys)
        turn = Turn(question.text, answer)
        key = service.tree.add(question.owner, keys[-1], turn, documents)
        if conversation is not None:
            conversations.move(question.owner, conversation.id, key)
    return key


def _told(service: "Service", question: Question, warm: Warm, outcome: Outcome) -> dict[str, Any]:
    """The `memstore` field of the answer."""
    most, trace = question.max_sources, warm.trace
    outcome.sources = [
        source
        for source in trace_report.sources(trace, service.store, most)
        if question.may_read(source.document)
    ]
    outcome.read = sum(block.mass for block in trace.blocks.values())
    may_read = question.may_read
    if question.trace:
        return trace_report.told(
            trace, warm.session, text=outcome.text, most=most, may_read=may_read
        )
    shown = ("document", "block", "span", "place", "text", "weight")
    return {
        "answered": outcome.answered,
        "absent": trace_report.absent(warm.session, may_read),
        "sources": [{name: getattr(source, name) for name in shown} for source in outcome.sources],
    }
