"""A server's service that is asked without HTTP in between, and step by step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore import MemoryStore, load_model
from memstore.disk.format.document import is_of_prompt
from memstore.serve.answering.answers import Answer, Outcome, Question
from memstore.serve.answering.sampling import Sampling
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings
from memstore.serve.state.turns import Turn
from support.diary import DIARY


class Asked:
    """A service that is asked without HTTP in between."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def begin(self, text: str, turns: tuple[Turn, ...] = (), **more: Any) -> Answer:
        """An answer of which nothing is made yet."""
        sampling = Sampling(8, sentence=True)
        question = Question(text, sampling, ["diary"], turns=turns, **more)
        return Answer(self.service.answers, question)

    def step(self, answer: Answer) -> str:
        """Make the next piece of an answer."""
        return self.service.worker.call("test/1", lambda: next(answer)).result(60)

    def finish(self, answer: Answer) -> Outcome:
        """Make an answer to its end."""
        self.service.worker.call("test/1", lambda: [*answer]).result(60)
        return answer.outcome

    def ask(self, text: str, turns: tuple[Turn, ...] = (), **more: Any) -> Outcome:
        return self.finish(self.begin(text, turns, **more))

    def begin_in(self, name: str, text: str, turns: tuple[Turn, ...] | None = None) -> Answer:
        """The same in a conversation of this name. turns: as the client says them, or else those
        that are stored.
        """
        conversations = self.service.conversations
        known = conversations.get_or_create("local", name)
        said = tuple(conversations.turns(known)) if turns is None else turns
        return self.begin(text, said, conversation=known)

    def said_in(self, name: str, text: str, turns: tuple[Turn, ...] | None = None) -> Outcome:
        return self.finish(self.begin_in(name, text, turns))

    @property
    def hidden(self) -> list[str]:
        """The names of documents that hold what did not fit into prompts, read to their end."""
        rows = self.service.store.documents()
        return [row.name for row in rows if is_of_prompt(row.name) and row.state == "ready"]

    def collect_garbage(self) -> None:
        """Collect garbage, and wait for what is done in the background."""
        self.service.collect_garbage()
        until = time.monotonic() + 60
        while self.service.worker.load["jobs"]:
            assert time.monotonic() < until
            time.sleep(0.01)


@contextmanager
def asked(directory: Path, **settings: Any) -> Iterator[Asked]:
    model = load_model()
    with MemoryStore.create(directory, model.signature, codec="raw") as store:
        model.ingest(DIARY, store, name="diary")
        service = Service(model, store, ServeSettings(window_tokens=32, **settings))
        try:
            yield Asked(service)
        finally:
            service.close()
