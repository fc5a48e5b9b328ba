"""Answers to chat requests: a question after earlier turns, the steps in which the model's thread
answers it, and the outcome.
"""

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memstore.freed_memory import return_freed_memory
from memstore.model.answer import Source, closest_sources, refusal
from memstore.model.batched_forward import read_pending
from memstore.model.model_api import ModelAPI
from memstore.model.session import AskSession, Continuation
from memstore.model.texts.detokenizer import Detokenizer
from memstore.serve.answering import trace_report
from memstore.serve.answering.trace import Trace
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import ApiError
from memstore.store.memory_store import MemoryStore

if TYPE_CHECKING:
    from torch import Tensor

_FREED_EVERY = 64  # answers


@dataclass(frozen=True)
class Turn:
    """An earlier message of the user, and what was answered."""

    question: str
    answer: str


@dataclass(frozen=True)
class Sampling:
    """How an answer is generated. sentence: end it after its first sentence or line."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    sentence: bool = False


@dataclass(frozen=True)
class Question:
    """A question after earlier turns. documents: gives the names of those to look in, when its turn
    comes; trace: report what every token and head read; from_memory: refuse where the gate finds
    no answer in the memory, and do not let the model answer without it.
    """

    text: str
    sampling: Sampling
    documents: Callable[[], Sequence[str]]
    turns: Sequence[Turn] = ()
    max_sources: int = 5
    trace: bool = False
    may_read: Callable[[str], bool] = lambda name: True  # may this document be shown?
    from_memory: bool = True


@dataclass
class Outcome:
    """What is known of an answer when it has ended."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    answered: bool = True
    refused: bool = False  # the text says so, and the sources are the closest passages
    sources: list[Source] = field(default_factory=list)  # that may be shown, best first
    seconds: float = 0.0  # from its turn to its end
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
        }


class Answer(Iterator[str]):
    """Pieces of an answer's text, one a step (some are empty); the outcome has the rest. For
    Worker.steps, which closes it where its client goes away.

    continuation: generates its tokens, while it does.
    """

    def __init__(self, answers: "Answers", question: Question) -> None:
        self.continuation: Continuation | None = None
        self.outcome = Outcome()
        self._answers, self._question = answers, question
        self._steps = self._run()

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
        trace = Trace(answers.model)
        try:
            with answers.open_session(question, trace) as session:
                yield from self._read_turns(session, until)
                trace.begin(session)
                with trace.step():
                    state = session.ask(question.text, trace.start)
                detokenizer = yield from self._generate(session, trace, state, until)
                _report(question, session, trace, outcome)
                if outcome.refused:
                    outcome.text = refusal(outcome.sources, session.needed)
                    yield outcome.text
                yield detokenizer.rest()
        except BaseException as error:
            failed = error
            raise
        finally:
            self.continuation = None
            outcome.seconds = time.perf_counter() - began
            answers.ended(outcome, failed)

    def _read_turns(self, session: AskSession, until: float) -> Generator[str, None, None]:
        """Read the earlier turns. until: the time, of perf_counter, by which that must end."""
        for turn in self._question.turns:
            session.tell(turn.question, turn.answer)
            yield ""
            if time.perf_counter() > until:
                raise ApiError(
                    400,
                    f"the conversation takes longer than {self._answers.most_seconds:.0f} s to "
                    "read; send fewer messages",
                    code="context_length_exceeded",
                    param="messages",
                )

    def _generate(
        self, session: AskSession, trace: Trace, state: "Tensor", until: float
    ) -> Generator[str, None, Detokenizer]:
        """The pieces of the text but the last, which the returned detokenizer still holds."""
        outcome, sampling = self.outcome, self._question.sampling
        outcome.prompt_tokens, outcome.answered = session.read_tokens, session.answered
        detokenizer = Detokenizer(
            self._answers.model.tokenizer, stop=sampling.stop, sentence=sampling.sentence
        )
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
        on_end: Callable[[Outcome, BaseException | None], None] | None = None,
    ) -> None:
        """at_once: how many the worker answers side by side; most_seconds: of one answer; on_end:
        called on the model's thread with every answer that ends, and the error that ended it.
        """
        self.model, self.most_seconds = model, most_seconds
        self._store, self._worker, self._on_end = store, worker, on_end
        self._count = 0  # of answers that have ended
        shape = model.shape
        layers = shape.num_layers if model.keeps is None else len(shape.memory_layers)
        share = store.tiers.host.capacity // (2 * layers * shape.num_kv_heads * at_once)
        self._own_blocks = max(model.lookup.top_k, share)

    def begin(self, question: Question) -> tuple[AsyncGenerator[str, None], Outcome]:
        """Queue a question: the pieces of its answer, and its outcome, complete when they end.
        Raises Busy, Stopped.
        """
        answer = Answer(self, question)
        return self._worker.steps(answer), answer.outcome

    def open_session(self, question: Question, trace: Trace) -> AskSession:
        """A session that looks in the question's documents."""
        return self.model.session(
            self._store, question.documents(), on_read=trace, own_blocks=self._own_blocks
        )

    def ended(self, outcome: Outcome, error: BaseException | None) -> None:
        """An answer has ended; error: what ended it, if it failed or its client left."""
        self._count += 1
        if self._count % _FREED_EVERY == 0:  # of sessions that come and go glibc keeps the memory
            return_freed_memory()
        if self._on_end is not None:
            self._on_end(outcome, error)


def decode_batch(works: Sequence[Iterator[Any]]) -> None:
    """Read the pending tokens of all answers among these works in one forward pass, where the first
    of them has one. For Worker, before each step.
    """
    going = [work.continuation for work in works if isinstance(work, Answer)]
    others = [one for one in going[1:] if one is not None]
    first = going[0] if going and isinstance(works[0], Answer) else None
    if first is not None and first.pending is not None and others:
        read_pending([first, *others])


def _report(question: Question, session: AskSession, trace: Trace, outcome: Outcome) -> None:
    """Fill in the sources, and the `memstore` field of the answer."""
    most, may_read = question.max_sources, question.may_read
    if outcome.refused:
        found = closest_sources(trace.reader, session, most)
    else:
        found = trace_report.sources(trace, session.store, most)
    outcome.sources = [source for source in found if may_read(source.document)]
    shown = ("document", "block", "span", "place", "text", "weight")
    sources = [{name: getattr(source, name) for name in shown} for source in outcome.sources]
    if question.trace:
        outcome.memstore = trace_report.report(
            trace, session, text=outcome.text, most=most, may_read=may_read
        )
        if outcome.refused:
            outcome.memstore["sources"] = [{**source, "tiers": {}} for source in sources]
        return
    outcome.memstore = {
        "answered": outcome.answered,
        "needed": session.needed,
        "absent": trace_report.absent(session, may_read),
        "sources": sources,
    }
