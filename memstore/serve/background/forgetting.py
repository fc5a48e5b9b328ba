"""Deletion of conversations and responses, with their turns, warm sessions and hidden documents."""

from contextlib import suppress

from memstore.errors import DocumentNotFound, MemoryLocked
from memstore.serve.answering.warm_sessions import WarmSessions
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import Stopped
from memstore.serve.state.conversations import Conversations
from memstore.serve.state.turn_tree import TurnTree
from memstore.store.memory_store import MemoryStore


class Forgetting:
    """Deletes from the tree of turns, then closes sessions, then forgets documents. Any thread but
    the model's may call; the model's is waited for.
    """

    def __init__(
        self,
        store: MemoryStore,
        tree: TurnTree,
        conversations: Conversations,
        sessions: WarmSessions,
        worker: Worker,
    ) -> None:
        self.store, self.tree, self.conversations = store, tree, conversations
        self._sessions, self._worker = sessions, worker

    def conversation(self, owner: str, name: str) -> None:
        """Forget a conversation, the turns that are its alone, and documents only it needs. Raises
        ApiError (404).
        """
        self._forget(*self.conversations.forget(owner, name))

    def response(self, owner: str, name: str) -> None:
        """Forget a response, the turns that are its alone, and documents only it needs. Raises
        ApiError (404).
        """
        key, documents = self.conversations.forget_response(owner, name)
        self._forget([key], documents)

    def origin(self, origin: bytes) -> None:
        """Forget all turns from a first one on, whoever needs them."""
        keys = self.tree.keys_from(origin)
        self._forget(keys, self.tree.forget_origin(origin))

    def _forget(self, keys: list[bytes], documents: list[str]) -> None:
        """Close sessions that ended with one of these turns, then forget hidden documents."""
        with suppress(Stopped):
            self._worker.call(
                "server/forget", lambda: self._sessions.forget(keys), at_once=True
            ).result()
        for name in documents:
            with suppress(DocumentNotFound, MemoryLocked):
                self.store.forget(name)
