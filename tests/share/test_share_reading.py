"""A publication gives the answers of its directory, to rounding, for both kinds of models."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("obstore")

from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.source_text import Text
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from support.published import Wild, WildPlace, open_at, publish_all
from support.rounding import TINY_MODEL, assert_same_to_rounding
from support.tiny_model import text, tiny_model

PHRASE = "the river lantern captain"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LandmarkModel:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", cmt_cutoff=0.0)


@pytest.fixture(scope="module")
def path(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory in a directory, and where it is published."""
    path = tmp_path_factory.mktemp("written")
    with MemoryStore.create(path / "m", model.signature) as store:
        for name in ("river", "garden", "night"):
            model.ingest(Text(text(120, len(name)), name), store)
        publish_all(store, f"file://{path}/there", 64 << 10)
    return path


def told(reader: Any, store: MemoryStore) -> Any:
    """All that a question, a session and a search report but for times and tiers. Sources are in
    the order of documents: where weights are nearly equal, rounding decides which comes first.
    """
    answer = reader.ask(PHRASE, store, max_new_tokens=6, max_sources=1000)
    sources = sorted((s.document, s.block, s.span, s.text, s.weight) for s in answer.sources)
    with reader.session(store) as session:
        states = session.feed(reader.tokenizer.encode(PHRASE))
        said = session.ask("where is the captain?", lambda: None)
    hits = sorted(
        (s.document, s.block, s.weight, s.text) for s in reader.search(PHRASE, store, top_k=1000)
    )
    return answer.tokens, answer.lookups, sources, states, said, hits


def same(one: Any, other: Any) -> None:
    """Numbers to rounding: which blocks are leased together decides the last bits."""
    for a, b in zip(one, other, strict=True):
        if isinstance(a, torch.Tensor):
            assert_same_to_rounding(a, b, products=TINY_MODEL)
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-4)
        elif isinstance(a, list | tuple):
            same(a, b)
        else:
            assert a == b


def test_a_landmark_model_answers_the_same(
    model: LandmarkModel, path: Path, tmp_path: Path
) -> None:
    with MemoryStore.open(path / "m", model.signature) as directory:
        expected = told(model, directory)
    cache = tmp_path / "cache"
    for _ in range(2):  # cold, then from the local cache alone
        with MemoryStore.open(f"file://{path}/there", model.signature, local_cache=cache) as store:
            same(told(model, store), expected)
            stats = store.tier_stats()
    assert stats["remote"]["hits"] == 0 and stats["local"]["hits"] > 0


def test_opening_a_publication_reads_only_landmarks_of_attached_documents(
    model: LandmarkModel, path: Path
) -> None:
    place = WildPlace(open_object_store(f"file://{path}/there"), Wild(0, 0.0))
    with open_at(place) as store:
        assert len(store.ready()) == 3 and place.requests == 0
        with model.session(store, ["garden"]):
            pass
        landmarks = place.requests
        assert 0 < landmarks <= 2  # all layers of the document together
        source = store._catalog.source
        assert source.counters["remote"].stats.hits == 0
        with model.session(store, ["garden"]):
            pass
        assert place.requests == landmarks


def test_a_passage_model_answers_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from support.passage_reader import reader_of

    reader = reader_of()
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as directory:
        for seed, name in enumerate(("kettle", "ladder")):
            reader.ingest(text(120, seed), directory, name=name)
        expected = told(reader, directory)
        place = publish_all(directory, f"file://{tmp_path}/there", 256 << 10)
    with MemoryStore.open(place.url, reader.signature, local_cache=tmp_path / "c") as store:
        same(told(reader, store), expected)
    counting = WildPlace(place, Wild(0, 0.0))
    with open_at(counting) as store:
        with reader.session(store) as session:
            found = counting.requests
            session.ask(PHRASE, lambda: None)
            layers, blocks = len(reader.shape.memory_layers), len(session.chosen)
        # all layers of a block are together, and all are read at once
        assert counting.requests - found <= blocks + 2 < layers * blocks + 2
