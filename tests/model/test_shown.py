"""The text shown for a block: whole sentences of bounded length, with their place."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.disk.format.document import PAGE, Place
from memstore.documents.converted import Converted
from memstore.model.answer import Source, block_texts, whole_sentences
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.source_text import Text
from memstore.store.memory_store import MemoryStore
from support.tiny_model import text, tiny_model

PLANTED = "The combination of the lime barn behind the mill of the old captain is 4467."
BODY = f"It was late, said Mr. Hill. {PLANTED} Nobody knew. {text(200)}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LandmarkModel:
    return tiny_model(tmp_path_factory.mktemp("model"), cmt_cutoff=0.0)


@pytest.fixture
def store(model: LandmarkModel, tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        model.ingest(BODY, store, name="a")
        yield store


def holding(model: LandmarkModel, store: MemoryStore, words: str) -> list[int]:
    """The blocks of "a" that hold some of these words, and none of them holds all."""
    first = BODY.index(words)
    found = [
        one
        for one in block_texts(model.tokenizer, store, store.document("a"))
        if one.start < first + len(words) - 1 and one.end > first + 1
    ]
    assert len(found) > 1 and all(words not in one.text for one in found)
    return [one.block for one in found]


def test_search_and_sources_of_an_answer_show_it_whole(
    model: LandmarkModel, store: MemoryStore
) -> None:
    wanted = set(holding(model, store, PLANTED))
    every = model.search(PLANTED, store, top_k=1000)
    answer = model.ask(PLANTED, store, max_new_tokens=2, max_sources=1000, top_k=1000)
    for shown in (every, answer.sources):
        own = [source for source in shown if source.block in wanted]
        assert own and all(PLANTED in source.text for source in own)


def test_a_very_long_sentence_is_shown_in_part_by_whole_words(
    model: LandmarkModel, tmp_path: Path
) -> None:
    body = " ".join(f"word{number}" for number in range(250))
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document, words = model.ingest(body, store, name="a"), set(body.split())
        for one in block_texts(model.tokenizer, store, document):
            source = Source.of(model, store, document, one.block, 0.0)
            first, end = source.span
            assert one.start - 300 <= first <= one.start + 1 and one.end <= end <= one.end + 300
            assert set(source.text.split()) <= words
            assert first == 0 or first < one.start - 290
            assert end == len(body) or end > one.end + 290


def test_the_place_of_a_source_covers_the_shown_text(model: LandmarkModel, tmp_path: Path) -> None:
    turned = BODY.index("4467")
    pages = (Place(0, PAGE, "1"), Place(turned, PAGE, "2"))
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(Text(Converted(BODY, pages, "pdf"), "a"), store)
        for block in holding(model, store, PLANTED):
            assert Source.of(model, store, document, block, 0.0).place == "pages 1-2"
        assert Source.of(model, store, document, document.blocks - 1, 0.0).place == "page 2"


@given(st.text(alphabet="ab1 .!?\n\"'#-|。、水é\u0301", max_size=200), st.data())
def test_a_shown_excerpt_holds_the_words_and_is_bounded(body: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(first, len(body)))
    most = data.draw(st.integers(0, 60))
    begin, stop = whole_sentences(body, first, end, most)
    assert max(0, first - most) <= begin <= stop <= min(len(body), end + most)
    if not body[first:end].strip():
        assert (begin, stop) == (first, end)
        return
    words = [at for at in range(first, end) if body[at].isalnum()]
    assert all(begin <= at < stop for at in words)
    assert body[begin:stop] == body[begin:stop].strip() != ""
