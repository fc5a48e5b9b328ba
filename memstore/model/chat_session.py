"""Questions and answers in one session of a model."""

import time
from collections.abc import Generator, Sequence
from typing import Any

from memstore.errors import InvalidInput
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import Answer, Collector, closest_sources
from memstore.model.batched_forward import read_pending
from memstore.model.session import AskSession, Continuation, attached, ends_sentence
from memstore.model.texts.detokenizer import Detokenizer
from memstore.tiers.stats import COUNTS


class Chat:
    """Questions and answers in one session: each sees what was said before, and the documents as
    they are then.
    """

    def __init__(
        self,
        reader: ModelAdapter,
        session: AskSession,
        collector: Collector,
        documents: Sequence[str] | None = None,
    ) -> None:
        """documents: names of those that are asked, which the session has attached; None for
        all.
        """
        self._reader, self._session, self._collector = reader, session, collector
        self._documents, self._asked = documents, False
        # what generates the answer's tokens, while it does
        self.continuation: Continuation | None = None

    def ask(self, question: str, **settings: Any) -> Answer:
        """Continue the session with a question and generate its answer; settings: of
        AnswerSettings. Raises InvalidInput, DocumentNotFound (a named one is gone).
        """
        asking = self.asking(question, **settings)
        while True:
            try:
                next(asking)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def asking(self, question: str, **settings: Any) -> Generator[str, None, Answer]:
        """`ask` piece by piece: yields the text as it is generated, an empty piece for a token that
        ends no character, and returns the answer.
        """
        chosen = self._reader.answering.changed(**settings)
        check_phrase("question", question)
        session, store, tokenizer = self._session, self._session.store, self._reader.tokenizer
        if self._asked:
            self._attach()
        self._asked = True
        began, tiers = time.perf_counter(), store.tier_stats()
        lookups = session.lookups
        done, skipped = lookups.done, lookups.skipped
        self._collector.stop()
        state = session.ask(question, self._collector.start)
        said = Detokenizer(tokenizer, sentence=chosen.until_sentence)
        first = 0.0
        silent = chosen.from_memory and not session.answered
        self.continuation = session.generate(
            state,
            0 if silent else chosen.max_new_tokens,
            temperature=chosen.temperature,
            seed=chosen.seed,
            stop=self._ends_answer if chosen.until_sentence else None,
        )
        for token in self.continuation:
            first = first or time.perf_counter() - began
            if piece := said.add(token):
                chosen.tell(piece)
            yield piece
        self.continuation = None
        if rest := said.rest():
            chosen.tell(rest)
            yield rest
        after, seconds = store.tier_stats(), time.perf_counter() - began
        if silent:
            sources = closest_sources(self._reader, session, chosen.max_sources)
        else:
            sources = self._collector.sources(self._reader, store, chosen.max_sources, session.same)
        return Answer(
            text=said.text,
            tokens=said.tokens,
            sources=sources,
            lookups={"done": lookups.done - done, "skipped": lookups.skipped - skipped},
            answered=session.answered,
            needed=session.needed,
            tiers={
                name: {count: after[name][count] - counts[count] for count in COUNTS}
                for name, counts in tiers.items()
            },
            absent=[row.name for row in store.readable().values() if row.id in session.absent],
            seconds=seconds,
            first_token_seconds=first,
        )

    def _attach(self) -> None:
        """Ask the documents that there are by now."""
        session = self._session
        documents, absent = attached(session.store, self._documents, retrieve=True)
        session.attach(documents)
        session.absent.clear()
        session.absent.update(absent)

    def _ends_answer(self, token: int) -> bool:
        return ends_sentence(self._reader.tokenizer.decode([token]))


def spoken(steps: Generator[str, None, Answer]) -> Generator[str, None, Answer]:
    """The pieces of an answer that hold text, and then the answer; ends the steps where it ends."""
    try:
        while True:
            if piece := next(steps):
                yield piece
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    finally:
        steps.close()


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
