"""Questions and answers in one session of a model, and the text of an answer that is generated
token by token.
"""

from collections.abc import Generator, Sequence
from typing import Any

from memstore.errors import InvalidInput
from memstore.model.adapter import ModelAdapter, TextTokenizer
from memstore.model.answer import Answer, closest_sources
from memstore.model.batched_forward import read_pending
from memstore.model.read_trace import Trace
from memstore.model.session import AskSession, Continuation, attached, ends_sentence


class Chat:
    """Questions and answers in one session: each sees what was said before, and the documents that
    there are then.
    """

    def __init__(
        self,
        reader: ModelAdapter,
        session: AskSession,
        trace: Trace,
        documents: Sequence[str] | None = None,
    ) -> None:
        """trace: the session's OnRead. documents: names of those that are asked, which the session
        has attached; None for all.
        """
        self.session, self.trace = session, trace
        self._reader, self._documents, self._asked = reader, documents, False
        # generates the answer's tokens, while it does
        self.continuation: Continuation | None = None
        self.prompt_tokens = 0  # read before the first token of the last answer

    def ask(self, question: str, **settings: Any) -> Answer:
        """Continue the session with a question and generate its answer; settings: of
        AnswerSettings. Raises InvalidInput, DocumentNotFound (a named one is gone).
        """
        return finished(self.asking(question, **settings))

    def asking(self, question: str, **settings: Any) -> Generator[str, None, Answer]:
        """`ask` piece by piece: yields the text while it is generated, an empty piece for a token
        that ends no character, and returns the answer.
        """
        chosen = self._reader.answering.changed(**settings)
        check_phrase("question", question)
        session, trace, store = self.session, self.trace, self.session.store
        if self._asked:
            session.attach(attached(store, self._documents, retrieve=True))
        self._asked = True
        trace.begin(session)
        with trace.step():
            state = session.ask(question, trace.start)
        self.prompt_tokens = session.read_tokens
        said = Detokenizer(self._reader.tokenizer, stop=chosen.stop, sentence=chosen.until_sentence)
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
            stop=lambda token: said.ended,
            logits=session.first_logits,
        )
        tokens.around = trace.step
        for token in trace.tokens_of(tokens):
            if piece := said.add(token):
                chosen.tell(piece)
            yield piece
        self.continuation = None
        if rest := said.rest():
            chosen.tell(rest)
            yield rest
        cut = tokens.stopped or len(said.tokens) == chosen.max_new_tokens
        return Answer(
            text=said.text,
            tokens=said.tokens,
            sources=closest_sources(self._reader, session, chosen.max_sources)
            if silent
            else trace.sources(store, chosen.max_sources, session.same),
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
        """End the answer that is generated after the tokens that it has."""
        if self.continuation is not None:
            self.continuation.stop()


def finished(steps: Generator[str, None, Answer]) -> Answer:
    """The answer of steps, all of which are taken."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: Answer = end.value
            return answer


def check_phrase(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidInput(f"the {what} must be text, is {text!r}")
    if not text.strip():
        raise InvalidInput(f"the {what} is empty")


def ask_together(chats: Sequence[Chat], questions: Sequence[str], **settings: Any) -> list[Answer]:
    """Continue each session with its question -> the answers; settings: of AnswerSettings. Seconds
    and what was read from the tiers are of all of them together. Raises as Chat.ask.
    """
    answers: dict[int, Answer] = {}
    going = {
        number: chat.asking(question, **settings)
        for number, (chat, question) in enumerate(zip(chats, questions, strict=True))
    }
    while going:
        for number, steps in list(going.items()):
            try:
                next(steps)
            except StopIteration as end:
                answers[number] = end.value
                del going[number]
        pending = [one for number in going if (one := chats[number].continuation) is not None]
        if len(pending) > 1:
            read_pending(pending)
    return [answers[number] for number in range(len(chats))]


class Detokenizer:
    """The text so far of tokens that are generated one by one, without the space around it.

    What may still turn out to be cut off (a character's first bytes, space at the end, a full stop
    that ends the answer, the beginning of a stop text) is held back.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, stop: Sequence[str] = (), sentence: bool = False
    ) -> None:
        """stop: texts that end it and are no part of it; sentence: so does the end of its first
        sentence or line.
        """
        self._tokenizer, self._stop, self._sentence = tokenizer, stop, sentence
        self.tokens: list[int] = []
        self.ended = False  # by a stop text, or by the end of a sentence
        self.cut = False  # a stop text was generated, which is no part of the answer
        self._text = ""  # of all tokens, up to a stop text, without the space before it
        self._sent = 0

    @property
    def text(self) -> str:
        """All of it, as it is sent in the end."""
        text = self._text.strip()
        return text.removesuffix(".") if self._sentence else text

    def add(self, token: int) -> str:
        """What can be sent now that this token is there."""
        self.tokens.append(token)
        self._text = self._tokenizer.decode(self.tokens).lstrip()
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.ended, self.cut = self._text[: min(found)], True, True
            return self.rest()
        if self._sentence and self.text and ends_sentence(self._tokenizer.decode([token])):
            self.ended = True
            return self.rest()
        return self._send(self._text[: len(self._text) - self._held(self._text)])

    def rest(self) -> str:
        """What is left to be sent when nothing follows."""
        return self._send(self.text)

    def _send(self, text: str) -> str:
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end of a text that wait for what follows."""
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
