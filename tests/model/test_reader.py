"""Sessions, ingest, search and index-building know a reader by its protocol alone: they work for
one that shares nothing with the model that ships.
"""

from pathlib import Path

import pytest
import torch

from memstore.errors import InvalidInput, WrongModel
from memstore.model.landmark.memory_attention import LandmarkAdapter
from memstore.store.memory_store import MemoryStore
from support.tiny_model import text, tiny_model
from support.toy_reader import BLOCK, LETTERS, ToyReader

BODY = "".join(letter for letter in text(300).lower() if letter in LETTERS)
SHORT = BODY[:500]  # BODY is long enough for an index


def test_another_reader_ingests_asks_and_searches(tmp_path: Path) -> None:
    reader = ToyReader()
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        document = reader.ingest(SHORT, store, name="book")
        assert document.tokens == len(SHORT) and document.blocks == -(-len(SHORT) // BLOCK)
        assert reader.ingest(SHORT, store, name="book") == document
        answer = reader.ask("the captain?", store, max_new_tokens=4, until_sentence=False)
    assert reader.heard == ["the captain?"]
    assert answer.sources and {read["layer"] for s in answer.sources for read in s.reads} <= {0, 2}
    for source in answer.sources:
        assert SHORT[slice(*source.span)] == source.text
    with MemoryStore.open(tmp_path / "m", reader.signature) as store:
        again = reader.ask("the captain?", store, max_new_tokens=4, until_sentence=False)
        assert again.tokens == answer.tokens
        phrase = SHORT[200:240]
        found = reader.search(phrase, store, top_k=1000)
        assert sorted(source.block for source in found) == list(range(document.blocks))
        assert 1 >= found[0].weight > found[-1].weight >= 0
        assert all(SHORT[slice(*source.span)] == source.text for source in found)
        with reader.chat(store) as chat:
            chat.ask("one", max_new_tokens=2)
            chat.ask("two", max_new_tokens=2)


def test_another_reader_is_told_apart_and_builds_its_own_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.model.landmark.landmark_session._STRETCHES", 1)  # of eight
    reader, other = ToyReader(), tiny_model(tmp_path / "model")
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        reader.ingest(BODY, store, name="book")
        assert set(reader.build_index(store)["engines"]) == {0, 2}
    with pytest.raises(WrongModel):
        MemoryStore.open(tmp_path / "m", other.signature)


def test_reading_on_in_chunks_equals_reading_at_once_for_another_reader(tmp_path: Path) -> None:
    reader = ToyReader()
    ids = reader.tokenizer.encode(SHORT[: 2 * BLOCK])
    with MemoryStore.in_memory(reader.signature, host_budget=1 << 20) as store:
        with reader.session(store, []) as session:
            whole = session.feed(ids)
        with reader.session(store, []) as session:
            parts = torch.cat([session.feed([token]) for token in ids])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_a_reader_that_foresees_nothing_answers_the_same_with_prefetch(tmp_path: Path) -> None:
    reader = ToyReader()
    other = tiny_model(tmp_path / "model")
    assert type(reader).next_projections is LandmarkAdapter.next_projections
    assert type(other).next_projections is not LandmarkAdapter.next_projections
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        reader.ingest(SHORT, store, name="book")
    answers = []
    for prefetch in ("off", "speculative"):
        with MemoryStore.open(tmp_path / "m", prefetch=prefetch) as store:
            answers.append(reader.ask("the river?", store, max_new_tokens=4).tokens)
            assert store.stats()["tiers"]["host"]["prefetched"] == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 5000}, "top_k is 5000"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"score_range": float("inf")}, "score_range is inf"),
        ({"score_range": float("nan")}, "score_range is nan"),
        ({"score_range": "all"}, "score_range is 'all'"),
        ({"recency": -1.0}, "recency is -1.0"),
        ({"supersede": -0.5}, "supersede is -0.5"),
        ({"granularity": "word"}, "granularity is 'word': choose one of per_token_per_head"),
        ({"cmt_cutoff": 1.5}, "cmt_cutoff is 1.5"),
        ({"chunk_blocks": 257}, "chunk_blocks is 257"),
        ({"margin": None, "chunk_blocks": "8"}, "chunk_blocks is '8'"),
        ({"local_tokens": 0}, "local_tokens is 0"),
        ({"caution": 0.5}, "caution is 0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_sources": -1}, "max_sources is -1"),
        ({"stop": [""]}, r"stop is \[''\]"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"documents": "book"}, r"a list of names: \['book'\]"),
        ({"top_q": 0.5}, "unknown setting .top_q."),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    tmp_path: Path, setting: dict[str, object], message: str
) -> None:
    reader = ToyReader()
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        reader.ingest(SHORT[:20], store, name="book")
        with pytest.raises(InvalidInput, match=message):
            reader.ask("who?", store, **setting)


def test_what_is_no_text_is_no_question_and_no_phrase(tmp_path: Path) -> None:
    reader = ToyReader()
    with MemoryStore.create(tmp_path / "m", reader.signature) as store:
        reader.ingest(SHORT[:20], store, name="book")
        with pytest.raises(InvalidInput, match="the question must be text, is None"):
            reader.ask(None, store)
        with pytest.raises(InvalidInput, match="the phrase must be text, is 5"):
            list(reader.search(5, store))
