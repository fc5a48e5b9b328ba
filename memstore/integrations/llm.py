"""A plug-in for the `llm` command: a model that answers from a memory, documents and passages as
fragments, and tools for other models. `llm` loads it by this package's entry point; the memory is
the one of `-o store DIR`, or of the variable MEMSTORE_STORE.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

from memstore.errors import MemstoreError
from memstore.integrations.opened import Opened, label, text_of

if TYPE_CHECKING:
    from memstore.model.chat_session import Chat

_STORE, _READER = "MEMSTORE_STORE", "MEMSTORE_MODEL"


class Options(llm.Options):
    """What `llm -o` may say of an answer."""

    store: str | None = Field(
        None, description=f"Directory or URL of the memory; default: ${_STORE}"
    )
    reader: str | None = Field(None, description=f"The model that reads it; default: ${_READER}")
    documents: str | None = Field(None, description="Ask these only, separated by commas")
    max_tokens: int | None = Field(None, description="Longest answer, in tokens")
    temperature: float | None = Field(None, description="0 takes the likeliest token")
    seed: int | None = Field(None, description="Makes random choices repeatable")
    top_k: int | None = Field(None, description="Blocks read by a lookup")


class MemstoreModel(llm.Model):
    """Answers from a memory; the questions of a conversation share a session."""

    model_id = "memstore"
    can_stream = True
    Options = Options

    def __init__(self) -> None:
        self._chat: Chat | None = None  # of the last conversation, warm for its next question
        self._chat_is: tuple[Any, ...] = ()
        self._open = ExitStack()

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Answer piece by piece; the sources are in the response's JSON (`llm logs --json`)."""
        if prompt.system:
            raise llm.ModelError("memstore takes no system prompt; leave it out")
        from memstore.model.chat_session import spoken

        options = prompt.options
        try:
            chat = self._chat_of(options, conversation)
            warm, self._chat_is = self._chat_is, ()  # a session that is left half-way is no use
            steps = chat.asking(
                prompt.prompt,
                max_new_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=options.seed,
            )
            answer = yield from spoken(steps)
        except (MemstoreError, OSError) as error:
            raise llm.ModelError(" ".join(str(error).split())) from None
        turns = 1 + len(conversation.responses) if conversation else 0
        self._chat_is = (*warm[:-1], turns)
        told = answer.to_dict()
        response.response_json = {name: told[name] for name in ("answered", "sources", "seconds")}
        response.set_usage(output=len(answer.tokens))
        if answer.refused:
            yield str(answer)

    def _chat_of(self, options: Any, conversation: llm.Conversation | None) -> "Chat":
        """The session in which a question is asked: the warm one, or one that is told what was said
        before.
        """
        from memstore.model.answer import Collector
        from memstore.model.chat_session import Chat

        earlier = conversation.responses if conversation else []
        lookup = (options.store, options.reader, options.documents, options.top_k)
        wanted = (*lookup, conversation and conversation.id, len(earlier))
        if conversation and self._chat is not None and wanted == self._chat_is:
            return self._chat
        self._open.close()
        reader, store = _opened(options.store, options.reader).get()
        names, collector = _names(options.documents), Collector()
        store.ready(names, to="ask")
        session = reader.session(store, names, on_read=collector, top_k=options.top_k)
        self._open.enter_context(session)
        for said in earlier:
            session.ask(said.prompt.prompt, lambda: None)
            session.feed(reader.tokenizer.encode(f" {said.text()}"))
        self._chat, self._chat_is = Chat(reader, session, collector, names), wanted
        return self._chat


class Memstore(llm.Toolbox):
    """Look things up in a memory: -T 'Memstore("DIR")', or -T Memstore with MEMSTORE_STORE."""

    def __init__(self, store: str = "", reader: str = "") -> None:
        self._of = store, reader

    def search(self, phrase: str, results: int = 5) -> list[dict[str, Any]]:
        """Find the passages of the memory that share most words with a phrase."""
        found = _opened(*self._of).search(phrase, None, results)
        return [{"place": label(s), "text": s.text, "weight": s.weight} for s in found]

    def ask(self, question: str) -> str:
        """Ask the memory a question; a few words, as they stand in its documents."""
        reader, store = _opened(*self._of).get()
        answer = reader.ask(question, store)
        return str(answer)

    def documents(self) -> list[str]:
        """List the documents of the memory."""
        _, store = _opened(*self._of).get()
        return [document.name for document in store.ready()]


def load_document(name: str) -> llm.Fragment:
    """A document of the memory $MEMSTORE_STORE, whole: memstore:NAME"""
    reader, store = _opened(None, None).get()
    return llm.Fragment(text_of(reader, store, name), f"memstore:{name}")


def load_passages(phrase: str) -> list[llm.Fragment]:
    """The five passages of $MEMSTORE_STORE that are likest a phrase: memstore-search:PHRASE"""
    found = _opened(None, None).search(phrase, None, 5)
    return [llm.Fragment(source.text, f"memstore:{label(source)}") for source in found]


@llm.hookimpl
def register_models(register: Any) -> None:
    """The model `memstore`."""
    register(MemstoreModel())


@llm.hookimpl
def register_fragment_loaders(register: Any) -> None:
    """Documents, and passages of them."""
    register("memstore", load_document)
    register("memstore-search", load_passages)


@llm.hookimpl
def register_tools(register: Any) -> None:
    """What a model that calls tools may do."""
    register(Memstore)


def _names(listed: str | None) -> list[str] | None:
    return None if not listed else [name.strip() for name in listed.split(",")]


def _opened(store: str | None, reader: str | None) -> Opened:
    where = store or os.environ.get(_STORE)
    if not where:
        raise llm.ModelError(f"say which memory: -o store DIR, or the variable {_STORE}")
    return _open_once(where, reader or os.environ.get(_READER) or None)


@lru_cache(maxsize=8)
def _open_once(store: str, reader: str | None) -> Opened:
    return Opened(store, reader)
