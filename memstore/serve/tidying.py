"""What a server does now and then: it forgets what is old or too much, and keeps as documents what
was said in conversations whose sessions had their time.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from memstore.disk.document import is_of_prompt
from memstore.errors import DocumentNotFound, MemoryLocked
from memstore.freed_memory import return_freed_memory
from memstore.model.text import Text
from memstore.serve.errors import ApiError
from memstore.serve.worker import Job, Stopped

if TYPE_CHECKING:
    from memstore.serve.service import Service

_RESPONSES = 16  # that are stored, for each conversation that may be
UNCLAIMED = 3600.0  # seconds until the document of a prompt goes that was never answered


class Tidying:
    """Tidies a service, whenever it is told to."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._remembering: Job | None = None

    def tidy(self) -> None:
        """Forget what was not used for long, and what is beyond the quota: warm sessions,
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

    def _tidy_sessions(self) -> None:
        self._service.sessions.tidy()
        return_freed_memory()  # of sessions that came and went glibc keeps more and more

    def _tidy_prompts(self) -> None:
        """Forget documents of prompts that nothing needs, and conversations whose documents take
        more than their quota, the longest unused ones first.
        """
        service = self._service
        needed = service.tree.documents() | service.sessions.documents
        before = time.time() - UNCLAIMED
        for document in service.store.documents():
            left = is_of_prompt(document.name) and document.name not in needed
            if left and document.created < before:
                with suppress(DocumentNotFound, MemoryLocked):
                    service.store.forget(document.name)
        for origin in service.tree.with_documents():
            sizes = {row.name: row.bytes for row in service.store.documents()}
            if sum(size for name, size in sizes.items() if is_of_prompt(name)) <= (
                service.settings.prompts_bytes
            ):
                break
            service.forget_origin(origin)

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
