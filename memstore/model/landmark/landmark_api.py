"""The API of a landmark model, whose every token and head looks blocks up."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memstore.errors import InvalidInput
from memstore.model.answer import Ranking
from memstore.model.ask_session import attached
from memstore.model.document_ingest import Ingesting, OnSize
from memstore.model.landmark.index_building import build_index
from memstore.model.landmark.landmark_ingest import ingest_by_landmarks
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.landmark.landmark_search import search_blocks
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.model.lookup_settings import AnswerSettings
from memstore.model.model_api import ModelAPI
from memstore.model.reads import OnRead
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode


class LandmarkAPI(ModelAPI, LandmarkAdapter):
    """The API by MemoryAttention in every layer."""

    answering = AnswerSettings()
    codec = "zstd"
    keeps = None

    def ingesting(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        retrieve: bool = False,
        keep: str = "kv",
        workers: int = 1,
        expect: OnSize | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting. retrieve: attend to retrieved blocks while reading instead of the
        latest ones (slower, for perplexity). keep: "kv", workers: 1; blocks depend on each other,
        and are computed once, one after the other.
        """
        if workers != 1:
            self.workers(workers)
        if keep != "kv":
            raise InvalidInput(
                "this model's blocks are computed one after the other, and kept: leave keep out"
            )
        text = source if isinstance(source, Text) else Text(source, name)
        settings = self.lookup.changed(**lookup)
        if settings.own_blocks is not None:
            raise InvalidInput(
                "own_blocks bounds a session; a document is stored whole: leave it out"
            )
        return ingest_by_landmarks(
            self, settings, store, text, mode=mode, retrieve=retrieve, expect=expect
        )

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build and save an approximate index of every document, for the queries of this reader:
        see index_building.py.
        """
        return build_index(self, store, progress)

    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        read_all_rows: bool = False,
        **lookup: Any,
    ) -> LandmarkSession:
        """As ModelAPI.session. read_all_rows: on_read is told what every row reads."""
        there, absent = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        session = LandmarkSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)
        session.attention.read_all_rows = read_all_rows
        session.absent.update(absent)
        return session

    def ranked(
        self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]], shortlist: int
    ) -> Ranking:
        """As ModelAPI.ranked; shortlist: blocks that the landmark keys choose to be compared with
        the phrase word by word.
        """
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        return Ranking(search_blocks(self, store, scope, ids, shortlist))
