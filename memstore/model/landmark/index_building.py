"""Build a memory's index with the queries of the model that will search it: from its own text, and
from questions.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.store.memory_store import MemoryStore

_STRETCHES = 8  # of the memory's text, each read by a session of its own
_TOKENS = 192  # of a stretch
_QUESTIONS = 6  # after each
# that the sampling sessions attend to at most: queries depend little on what else there is
_BLOCKS = 32_768
_ASKED = ("price", "name", "colour", "age", "number", "owner", "weight", "key")
_OF = ("red fox", "old bridge", "silver lamp", "north gate", "small ship", "stone table")


def build_index(
    reader: LandmarkAdapter, store: MemoryStore, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Sample queries, then build and save the store's index; returns what was built (see
    MemoryStore.build_index).

    Sessions read stretches of the memory's own text and questions in the plain form, and every
    lookup that the gate lets through is a sample: a head whose gate opens at questions only is
    sampled there.

    Raises InvalidInput for a memory without a finished document or an index that builds nothing,
    ReadOnlyMemory, StorageFull.
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
            with LandmarkSession(reader, reader.lookup, store, attached) as session:
                session.feed(store.tokens(document.id, first, first + _TOKENS).ids.tolist())
                for _ in range(_QUESTIONS):
                    what = f"the {rng.choice(_ASKED)} of the {rng.choice(_OF)}"
                    question = f" What is {what}? {what.capitalize()} is"
                    session.feed(reader.tokenizer.encode(question))
    return store.build_index(reader.lookup.top_k, progress)
