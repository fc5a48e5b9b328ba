"""What every router is given: the reader, its memory, the one thread that owns both, and what the
server remembers.
"""

import threading
import time
from contextlib import suppress
from pathlib import Path

from memstore.disk.document import is_of_prompt
from memstore.errors import DocumentNotFound, MemoryLocked
from memstore.model.verbs import Verbs
from memstore.serve.answering.answers import read_ahead
from memstore.serve.answering.warm_sessions import Sessions
from memstore.serve.answering.worker import Stopped, Worker
from memstore.serve.api_errors import not_found
from memstore.serve.api_keys import Access, Keys
from memstore.serve.background.file_ingest import Ingests
from memstore.serve.background.garbage_collection import Tidying
from memstore.serve.settings import ServeSettings
from memstore.serve.state.conversations import Conversations
from memstore.serve.state.database import Database
from memstore.serve.state.turn_tree import TurnTree
from memstore.serve.state.vector_tables import VectorStores
from memstore.serve.telemetry import Telemetry
from memstore.store.memory_store import MemoryStore


class Service:
    """One memory served by one process. Whatever computes with `reader`, or looks up in `store`,
    does so by `worker`.
    """

    def __init__(
        self,
        reader: Verbs,
        store: MemoryStore,
        settings: ServeSettings | None = None,
        *,
        keys: Keys | None = None,
        model: str = "memstore",
        directory: Path | None = None,
    ) -> None:
        """model: its name for clients. directory: where serve.sqlite lies; the memory's, unless
        told; of a published memory nowhere: it ends with the process.
        """
        self.reader, self.store, self.model = reader, store, model
        self.settings = settings or ServeSettings()
        self.keys = keys or Keys()
        place = store.place if store.path is None else str(store.path.resolve())
        self.database = Database(directory or store.path, of=None if directory is None else place)
        self.worker = Worker(
            active=self.settings.active,
            waiting=self.settings.waiting,
            wait_seconds=self.settings.wait_seconds,
            between=self.settings.between_chunks,
            together=read_ahead,
        )
        self.started = int(time.time())
        self.tree = TurnTree(self.database)
        self.conversations = Conversations(self.database, self.tree)
        # by owner and name, of those that are being gone on with: set where it is forgotten, since
        # another may have its name then. The model's thread alone adds and removes.
        self.conversing: dict[tuple[str, str], threading.Event] = {}
        self.sessions = Sessions(
            reader, store, self.settings, most_bytes=lambda: self.conversations_bytes
        )
        self.telemetry = Telemetry(self)
        self.ingests = Ingests(self)
        self.vector_stores = VectorStores(self.database)
        self.tidying = Tidying(self)

    @property
    def conversations_bytes(self) -> int:
        """What conversations of one key may take: of a memory with a quota all keys' together no
        more than half.
        """
        most, quota = self.settings.conversations_bytes, self.store.quota
        return most if quota is None else min(most, quota // (2 * self.keys.count))

    def documents(self, access: Access, names: list[str] | None = None) -> list[str]:
        """The names of the finished documents that an asker may read: those he named, or all that
        are not hidden, oldest first. Raises ApiError (404), InvalidInput (partly read).
        """
        if names is None:
            return [document.name for document in self.store.ready() if access.sees(document.name)]
        for name in dict.fromkeys(names):
            if not self.visible(access, name):
                raise not_found("document", name)
        once = list(dict.fromkeys(names))  # a name that is given often is read once
        return [document.name for document in self.store.ready(once)] if names else []

    def visible(self, access: Access, name: str) -> bool:
        """Is there a document of this name that the asker may know of?"""
        return access.sees(name) and not is_of_prompt(name) and self.store.has(name)

    def may_write(self, access: Access) -> bool:
        """May an asker have documents read and forgotten?"""
        return access.write and not self.store.read_only

    def forget(self, name: str) -> None:
        """Forget a document, and the uploaded file that it was. Raises DocumentNotFound,
        MemoryLocked, ReadOnlyMemory.
        """
        self.ingests.forget(name)

    def forget_conversation(self, owner: str, name: str) -> None:
        """Forget a conversation, what was said in it alone, and what it alone remembers. Raises
        ApiError (404).
        """
        forgotten = self.conversing.get((owner, name))
        if forgotten is not None:
            forgotten.set()
        self._forget_said(*self.conversations.forget(owner, name))

    def forget_response(self, owner: str, name: str) -> None:
        """Forget a response, what was said for it alone, and what it alone remembers. Raises
        ApiError (404).
        """
        forgotten = self.conversations.forget_response(owner, name)
        if forgotten is None:
            raise not_found("response", name)
        key, documents = forgotten
        self._forget_said([key], documents)

    def forget_origin(self, origin: bytes) -> None:
        """Forget all that was said after a first turn, whoever needs it."""
        keys = self.tree.keys_from(origin)
        self._forget_said(keys, self.tree.forget_origin(origin))

    def _forget_said(self, keys: list[bytes], documents: list[str]) -> None:
        """Close sessions in which one of these was said last, then forget hidden documents."""
        with suppress(Stopped):
            self.worker.call(
                "server/forget", lambda: self.sessions.forget(keys), at_once=True
            ).result()
        for name in documents:
            with suppress(DocumentNotFound, MemoryLocked):
                self.store.forget(name)

    def close(self, seconds: float = 5.0) -> None:
        """End what runs, then close the database; the store is its opener's to close."""
        self.worker.stop(seconds)
        self.ingests.close()
        self.sessions.forget()
        self.database.close()
