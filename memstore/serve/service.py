"""The parts of one server, put together: a model, its memory, the one thread that owns both, and
what the server stores.
"""

import time
from pathlib import Path

from memstore.model.model_api import ModelAPI
from memstore.serve.answering.answers import Answers
from memstore.serve.answering.batched_decode import decode_batch
from memstore.serve.answering.warm_sessions import WarmSessions
from memstore.serve.answering.worker import Worker
from memstore.serve.api_keys import Keys
from memstore.serve.background.backfill import Backfill
from memstore.serve.background.file_ingest import FileIngest
from memstore.serve.background.forgetting import Forgetting
from memstore.serve.background.garbage_collection import GarbageCollection
from memstore.serve.document_access import DocumentAccess
from memstore.serve.mcp.tools import MemoryTools
from memstore.serve.settings import ServeSettings
from memstore.serve.state.conversations import Conversations
from memstore.serve.state.database import Database
from memstore.serve.state.file_batches import FileBatches
from memstore.serve.state.turn_tree import TurnTree
from memstore.serve.state.uploads import Uploads
from memstore.serve.state.vector_tables import VectorStores
from memstore.serve.telemetry import Telemetry
from memstore.store.memory_store import MemoryStore


class Service:
    """One memory served by one process. Whatever computes with `reader`, or looks up in `store`,
    does so by `worker`.
    """

    def __init__(
        self,
        reader: ModelAPI,
        store: MemoryStore,
        settings: ServeSettings | None = None,
        *,
        keys: Keys | None = None,
        model: str = "memstore",
        directory: Path | None = None,
    ) -> None:
        """model: its name for clients. directory: where serve.sqlite lies; by
        default the memory's; of a published memory nowhere: it ends with the process.
        """
        self.reader, self.store, self.model = reader, store, model
        self.settings = settings = settings or ServeSettings()
        self.keys = keys = keys or Keys()
        self.started = int(time.time())
        self.telemetry = Telemetry(model, metrics=settings.metrics, spans=settings.telemetry)
        place = store.place if store.path is None else str(store.path.resolve())
        self.database = Database(directory or store.path, of=None if directory is None else place)
        self.documents = DocumentAccess(store)
        self.tree = TurnTree(self.database)
        self.conversations = Conversations(self.database, self.tree)
        self.uploads = Uploads(
            self.database,
            store,
            reader.tokenizer,
            most_files=settings.files,
            most_bytes=settings.files_bytes,
        )
        self.vector_stores = VectorStores(self.database)
        self.file_batches = FileBatches(self.vector_stores)
        self.worker = Worker(
            active=settings.active,
            waiting=settings.waiting,
            wait_seconds=settings.wait_seconds,
            between=settings.between_chunks,
            before_step=decode_batch,
        )
        most_bytes = _conversations_bytes(settings, store, keys)
        self.sessions = WarmSessions(reader, store, settings, most_bytes=most_bytes)
        self.telemetry.observe(store, self.load)
        self.answers = Answers(
            reader,
            self.sessions,
            self.conversations,
            self.worker,
            most_seconds=settings.answer_seconds,
            on_end=self.telemetry.ended,
        )
        self.file_ingest = FileIngest(
            reader, store, self.uploads, Backfill(self.database, store, self.uploads), self.worker
        )
        self.forgetting = Forgetting(
            store, self.tree, self.conversations, self.sessions, self.worker
        )
        self.garbage = GarbageCollection(
            self.sessions, self.worker, self.forgetting, settings=settings, most_bytes=most_bytes
        )

    @property
    def tools(self) -> MemoryTools:
        """What MCP offers of it."""
        return MemoryTools(
            self.reader,
            self.store,
            self.worker,
            self.answers,
            self.documents,
            self.uploads,
            self.file_ingest,
            self.settings.max_tokens,
        )

    def load(self) -> dict[str, int]:
        """How many questions are "active" and "waiting", "jobs" in the background, and
        "warm_sessions".
        """
        return {**self.worker.load, "warm_sessions": self.sessions.count}

    def collect_garbage(self) -> None:
        """Forget what is old or too much; waits for the model's thread."""
        self.garbage.collect()
        self.uploads.collect_garbage()

    def close(self, seconds: float = 5.0) -> None:
        """End what runs, then close the database; the store is its opener's to close."""
        self.worker.stop(seconds)
        self.file_ingest.close()
        self.sessions.forget()
        self.database.close()


def _conversations_bytes(settings: ServeSettings, store: MemoryStore, keys: Keys) -> int:
    """What conversations of one key may take: of a memory with a quota all keys' together no more
    than half.
    """
    most, quota = settings.conversations_bytes, store.quota
    return most if quota is None else min(most, quota // (2 * keys.count))
