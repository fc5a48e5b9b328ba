"""Garbage collection: what is old or beyond a quota is forgotten, now and then; of sessions whose
time is over, what will not fit into a prompt is read as documents.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from memstore.disk.format.document import is_of_prompt
from memstore.errors import DocumentNotFound, MemoryLocked
from memstore.freed_memory import return_freed_memory
from memstore.model.texts.source_text import Text
from memstore.serve.answering.jobs import Job
from memstore.serve.answering.long_prompts import name_prefix
from memstore.serve.answering.warm_sessions import WarmSessions
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import ApiError, Stopped
from memstore.serve.background.forgetting import Forgetting
from memstore.serve.settings import ServeSettings

_RESPONSES = 16  # that are stored, for each conversation that may be
UNCLAIMED = 3600.0  # seconds until the document of a prompt goes that was never answered
UNCLAIMED_BEYOND = 60.0  # the same where its owner has more than he may


class GarbageCollection:
    """What a server deletes, and reads, without being asked to."""

    def __init__(
        self,
        sessions: WarmSessions,
        worker: Worker,
        forgetting: Forgetting,
        *,
        settings: ServeSettings,
        most_bytes: int,
    ) -> None:
        """most_bytes: that conversations of one key may take."""
        self._sessions, self._worker, self._forgetting = sessions, worker, forgetting
        self._store, self._tree = forgetting.store, forgetting.tree
        self._conversations = forgetting.conversations
        self._settings, self._most_bytes = settings, most_bytes
        self._remembering: Job | None = None

    def collect(self) -> None:
        """Forget what was not used for long, and what is beyond a key's own quota: warm sessions,
        conversations, and documents of prompts that no conversation needs. Waits for the model's
        thread.
        """
        seconds, most = self._settings.keep_seconds, self._settings.conversations
        with suppress(Stopped):
            self._worker.call("server/gc", self._collect_sessions, at_once=True).result()
            self.remember()
        for owner, name in self._conversations.unused_names(seconds, most):
            with suppress(ApiError):
                self._forgetting.conversation(owner, name)
        for owner, name in self._conversations.unused_responses(seconds, _RESPONSES * most):
            with suppress(ApiError):
                self._forgetting.response(owner, name)
        for origin in self._tree.unused(seconds, most):
            self._forgetting.origin(origin)
        self._collect_prompts()

    def _collect_sessions(self) -> None:
        self._sessions.evict()
        return_freed_memory()  # of sessions that came and went glibc keeps more and more

    def _collect_prompts(self) -> None:
        """Forget documents of prompts that nothing needs, and of an owner whose conversations take
        more than they may the longest unused ones.
        """
        needed = self._tree.documents().keys() | self._sessions.documents
        now, held, most = time.time(), self._held(), self._most_bytes
        for document in self._store.documents():
            if is_of_prompt(document.name) and document.name not in needed:
                over = held[document.name[: len(name_prefix(""))]] > most
                if document.created < now - (UNCLAIMED_BEYOND if over else UNCLAIMED):
                    with suppress(DocumentNotFound, MemoryLocked):
                        self._store.forget(document.name)
        for owner in self._tree.sizes():
            if self._held()[name_prefix(owner)] <= most:
                continue
            for origin in self._tree.origins(owner):
                self._forgetting.origin(origin)
                if self._held()[name_prefix(owner)] <= most:
                    break

    def _held(self) -> Counter[str]:
        """Bytes of turns, and of the documents that hold them, by the prefix of an owner's."""
        tree, held = self._tree, Counter[str]()
        for owner, size in tree.sizes().items():
            held[name_prefix(owner)] += size
        begins = {name: name_prefix(owner) for name, owner in tree.documents().items()}
        for document in self._store.documents():
            if is_of_prompt(document.name):
                its = document.name[: len(name_prefix(""))]  # of one that is not answered yet
                held[begins.get(document.name, its)] += document.bytes
        return held

    def remember(self) -> None:
        """Have what was said in sessions that had their time be read as documents, as far as it
        will not fit into a prompt when the conversation goes on: a chunk at a time, in the
        background, as that question would have to wait for.
        """
        if self._remembering is not None and not self._remembering.finished.is_set():
            return
        plans: list[tuple[bytes, list[Text]]] = []
        for owner, key in self._sessions.cold():
            plan = self._sessions.window.plan(owner, self._tree.turns(key), "")
            if plan.documents and self._tree.need(key, plan.names):
                plans.append((key, plan.documents))
        if plans:
            self._remembering = self._worker.in_background("server", self._ingest(plans))

    def _ingest(self, plans: Sequence[tuple[bytes, list[Text]]]) -> Iterator[None]:
        """Read them; what is forgotten meanwhile is forgotten here."""
        for key, documents in plans:
            for text in documents:
                with closing(self._sessions.read_behind(text)) as chunks:
                    for _ in chunks:
                        yield
                        if not self._tree.known(key):
                            break
            if not self._tree.known(key):
                for name in self._tree.not_needed(text.name for text in documents):
                    with suppress(DocumentNotFound):
                        self._store.forget(name)
