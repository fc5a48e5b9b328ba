"""The parts of one server: a model, its memory, the one thread that works with both, and the
documents and answers that requests ask for.
"""

from memstore.model.model_api import ModelAPI
from memstore.serve.answers import Answers, decode_batch
from memstore.serve.api_keys import Keys
from memstore.serve.documents import Documents
from memstore.serve.metrics import ServerMetrics
from memstore.serve.settings import ServeSettings
from memstore.serve.worker import Worker
from memstore.store.memory_store import MemoryStore


class Service:
    """One memory served by one process. Whatever computes with `model`, or looks up in `store`,
    does so on the thread of `worker`.
    """

    def __init__(
        self,
        model: ModelAPI,
        store: MemoryStore,
        settings: ServeSettings | None = None,
        *,
        keys: Keys | None = None,
        name: str = "memstore",
    ) -> None:
        """name: of the model, for clients."""
        self.model, self.store, self.name = model, store, name
        self.settings = settings = settings or ServeSettings()
        self.keys = keys or Keys()
        self.worker = Worker(
            active=settings.active,
            waiting=settings.waiting,
            between=settings.between_chunks,
            before_step=decode_batch,
        )
        self.metrics = ServerMetrics(store, lambda: self.worker.load)
        self.documents = Documents(
            model, store, self.worker, most_characters=4 * settings.body_bytes
        )
        self.answers = Answers(
            model,
            store,
            self.worker,
            at_once=settings.active,
            most_seconds=settings.answer_seconds,
            on_end=self.metrics.ended,
        )

    def close(self, seconds: float = 5.0) -> None:
        """End what runs; the store is its opener's to close. seconds: that answers have left."""
        self.worker.stop(seconds)
