"""The parts of one server: a model, its memory, the thread that uses both, documents, metrics."""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing

from memstore.freed_memory import return_freed_memory
from memstore.model.model_api import Chat, ModelAPI
from memstore.serve.access import Keys
from memstore.serve.answers import Outcome, Question, QueuedAnswer, decode_batch
from memstore.serve.api_errors import ApiError
from memstore.serve.documents import Documents
from memstore.serve.metrics import ServerMetrics
from memstore.serve.settings import ServeSettings
from memstore.serve.worker import Worker
from memstore.store.memory_store import MemoryStore

_FREED_EVERY = 64  # answers between two returns of free memory to the system


class Service:
    """One memory and its model, served by one process; only `worker`'s thread uses them."""

    def __init__(
        self,
        model: ModelAPI,
        store: MemoryStore,
        settings: ServeSettings | None = None,
        *,
        keys: Keys | None = None,
        name: str = "memstore",
    ) -> None:
        """name: the model's, for clients."""
        self.model, self.store, self.name = model, store, name
        self.settings = settings = settings or ServeSettings()
        self.keys = keys or {}
        self.worker = Worker(
            active=settings.active,
            waiting=settings.waiting,
            between=settings.between_chunks,
            before_step=decode_batch,
        )
        self.metrics = ServerMetrics(store, lambda: self.worker.load)
        self.documents = Documents(model, store, self.worker, settings)
        self._ended = 0  # ended answers
        shape = model.shape
        # a passage is one unit of the tiers; a block is one in each layer and KV head
        units = shape.num_layers * shape.num_kv_heads if model.keeps is None else 1
        share = store.tiers.host.capacity // (2 * units * settings.active)
        self._own_blocks = max(model.lookup.top_k, share)

    def ask(self, question: Question) -> tuple[AsyncGenerator[str, None], Outcome]:
        """Queue a question; return the pieces of its answer, and the outcome, which is complete
        after the last piece. Raises Busy, Stopped.
        """
        answer = QueuedAnswer(question, self._chat, self.settings.answer_seconds, self._end)
        return self.worker.steps(answer), answer.outcome

    async def ask_whole(self, question: Question) -> Outcome:
        """The outcome of an answer, once it is complete. Raises what `ask` and the answer raise."""
        pieces, outcome = self.ask(question)
        async with aclosing(pieces):
            async for _ in pieces:
                pass
        return outcome

    def _chat(self, question: Question) -> AbstractContextManager[Chat]:
        if question.settings.get("from_memory", True) and not self.store.ready(question.documents):
            message = "the memory holds no documents to answer from; upload one first"
            raise ApiError(409, message, code="no_documents")
        return self.model.chat(self.store, question.documents, own_blocks=self._own_blocks)

    def _end(self, outcome: Outcome, error: BaseException | None) -> None:
        self._ended += 1
        if self._ended % _FREED_EVERY == 0:  # glibc keeps the memory of ended sessions
            return_freed_memory()
        self.metrics.ended(outcome, error)
