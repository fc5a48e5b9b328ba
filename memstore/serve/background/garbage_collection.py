"""What a server does now and then: it forgets what is old or too much, and keeps as documents what
was said in conversations whose sessions had their time.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from memstore.disk.document import is_of_prompt
from memstore.errors import DocumentNotFound, MemoryLocked
from memstore.freed_memory import return_freed_memory
from memstore.model.text import Text
from memstore.serve.answering.long_prompts import beginning_of
from memstore.serve.answering.worker import Job, Stopped
from memstore.serve.api_errors import ApiError

if TYPE_CHECKING:
    from memstore.serve.service import Service

_RESPONSES = 16  # that are stored, for each conversation that may be
UNCLAIMED = 3600.0  # seconds until the document of a prompt goes that was never answered
UNCLAIMED_BEYOND = 60.0  # the same where its owner has more than he may


class Tidying:
    """Tidies a service, whenever it is told to."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._remembering: Job | None = None

    def tidy(self) -> None:
        """Forget what was not used for long, and what is beyond a key's own quota: warm sessions,
        conversations, and documents of prompts that no conversation needs. Waits for the model's
        thread.
        """
        service = self._service
        settings, conversations = service.settings, service.conversations
        with suppress(Stopped):
            service.worker.call("server/tidy", self._tidy_sessions, at_once=True).result()
            self.remember()
        unused = conversations.unused_names(settings.keep_seconds, settings.conversations)
        for owner, name in unused:
            with suppress(ApiError):
                service.forget_conversation(owner, name)
        most = _RESPONSES * settings.conversations
        for owner, name in conversations.unused_responses(settings.keep_seconds, most):
            with suppress(ApiError):
                service.forget_response(owner, name)
        for origin in service.tree.unused(settings.keep_seconds, settings.conversations):
            service.forget_origin(origin)
        self._tidy_prompts()
        service.ingests.uploads.tidy()

    def _tidy_sessions(self) -> None:
        self._service.sessions.tidy()
        return_freed_memory()  # of sessions that came and went glibc keeps more and more

    def _tidy_prompts(self) -> None:
        """Forget documents of prompts that nothing needs, and of an owner whose conversations take
        more than they may the longest unused ones.
        """
        service = self._service
        needed = service.tree.documents().keys() | service.sessions.documents
        now, held, most = time.time(), self._held(), service.conversations_bytes
        for document in service.store.documents():
            if is_of_prompt(document.name) and document.name not in needed:
                over = held[document.name[: len(beginning_of(""))]] > most
                if document.created < now - (UNCLAIMED_BEYOND if over else UNCLAIMED):
                    with suppress(DocumentNotFound, MemoryLocked):
                        service.store.forget(document.name)
        for owner in service.tree.sizes():
            if self._held()[beginning_of(owner)] <= most:
                continue
            for origin in service.tree.origins(owner):
                service.forget_origin(origin)
                if self._held()[beginning_of(owner)] <= most:
                    break

    def _held(self) -> Counter[str]:
        """Bytes of what was said, and of the documents that hold it, by how an owner's begin."""
        tree, held = self._service.tree, Counter[str]()
        for owner, size in tree.sizes().items():
            held[beginning_of(owner)] += size
        begins = {name: beginning_of(owner) for name, owner in tree.documents().items()}
        for document in self._service.store.documents():
            if is_of_prompt(document.name):
                its = document.name[: len(beginning_of(""))]  # of one that is not answered yet
                held[begins.get(document.name, its)] += document.bytes
        return held

    def remember(self) -> None:
        """Have what was said in sessions that had their time be read as documents, as far as it
        will not fit into a prompt when the conversation goes on: a chunk at a time, in the
        background, as that question would have to wait for.
        """
        service = self._service
        if self._remembering is not None and not self._remembering.finished.is_set():
            return
        plans: list[tuple[bytes, list[Text]]] = []
        for owner, key in service.sessions.cold():
            plan = service.sessions.window.plan(owner, service.tree.turns(key), "")
            if plan.documents and service.tree.need(key, plan.names):
                plans.append((key, plan.documents))
        if plans:
            self._remembering = service.worker.in_background("server", self._reading(plans))

    def _reading(self, plans: Sequence[tuple[bytes, list[Text]]]) -> Iterator[None]:
        """Read them; what is forgotten meanwhile is forgotten here."""
        service = self._service
        for key, documents in plans:
            for text in documents:
                with closing(service.sessions.read_behind(text)) as chunks:
                    for _ in chunks:
                        yield
                        if not service.tree.known(key):
                            break
            if not service.tree.known(key):
                for name in service.tree.not_needed(text.name for text in documents):
                    with suppress(DocumentNotFound):
                        service.store.forget(name)
