"""The API of a landmark model, whose every token and head looks blocks up."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from memstore.errors import InvalidInput
from memstore.model.answer import Ranking
from memstore.model.document_ingest import Ingesting
from memstore.model.landmark.landmark_ingest import ingest_by_landmarks
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.landmark.landmark_search import search_blocks
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.model.lookup_settings import AnswerSettings
from memstore.model.model_api import ModelAPI
from memstore.model.session import OnRead, attached
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode

_STRETCHES = 8  # of the memory's text, each read by a session of its own
_TOKENS = 192  # of a stretch
_QUESTIONS = 6  # after each
# that the sampling sessions attend to at most: queries depend little on what else there is
_BLOCKS = 32_768
_ASKED = ("price", "name", "colour", "age", "number", "owner", "weight", "key")
_OF = ("red fox", "old bridge", "silver lamp", "north gate", "small ship", "stone table")


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
        keep: str | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting. keep: "kv"; blocks depend on each other, and are computed once,
        one after the other.
        """
        if keep not in (None, "kv"):
            raise InvalidInput(
                "this model's blocks are computed one after the other, and kept: leave keep out"
            )
        text = source if isinstance(source, Text) else Text(source, name)
        settings = self.lookup.changed(**lookup)
        if settings.own_blocks is not None:
            raise InvalidInput(
                "own_blocks bounds a session; a document is stored whole: leave it out"
            )
        return ingest_by_landmarks(self, settings, store, text, mode=mode)

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Sample queries, then build and save the store's index; returns what was built (see
        MemoryStore.build_index).

        Sessions read stretches of the memory's own text and questions in the plain form, and every
        lookup that the gate lets through is a sample: a head whose gate opens at questions only is
        sampled there.

        Raises InvalidInput for a memory without a finished document or an index that builds
        nothing, ReadOnlyMemory, StorageFull.
        """
        ready = [document for document in store.ready(to="index") if document.blocks]
        rng = Random(0)
        attached: list[tuple[int, int]] = []
        blocks = 0
        for document in rng.sample(ready, len(ready)):
            if not attached or blocks + document.blocks <= _BLOCKS:
                attached.append((document.id, document.blocks))
                blocks += document.blocks
        with store.retrieval.sampled_queries():
            for _ in range(_STRETCHES):
                document = rng.choices(ready, [document.tokens for document in ready])[0]
                first = rng.randrange(max(1, document.tokens - _TOKENS))
                with LandmarkSession(self, self.lookup, store, attached) as session:
                    session.feed(store.tokens(document.id, first, first + _TOKENS).ids.tolist())
                    for _ in range(_QUESTIONS):
                        what = f"the {rng.choice(_ASKED)} of the {rng.choice(_OF)}"
                        question = f" What is {what}? {what.capitalize()} is"
                        session.feed(self.tokenizer.encode(question))
        return store.build_index(self.lookup.top_k, progress)

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
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        session = LandmarkSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)
        session.attention.read_all_rows = read_all_rows
        return session

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranking:
        """As ModelAPI.ranked."""
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        return Ranking(search_blocks(self, store, scope, ids))
