"""Documents are published, replaced and removed while a reader has the memory open: it follows
without being opened again, what has begun is finished with what it began with, and publishers at
once lose nothing of each other's.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("obstore")

import memstore
from memstore import load_model
from memstore.block import BlockKey
from memstore.errors import DocumentNotFound, StoreUnavailable
from memstore.model.answer import Answer
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.share.format.published import Published
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.merge import merge
from memstore.share.publish.publish import unpublish
from memstore.share.read import published_states, published_tables
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_published
from support.places import WatchedPlace
from support.published import open_at
from support.synthetic_documents import SIGNATURE, ingest

QUESTION = "What is the price of the brown mare?"
OLD, NEW = "The price of the brown mare is 310.", "The price of the brown mare is 777."
FILL = " ".join(f"Nobody saw the number {n} of the valley." for n in range(40))


def passage_model() -> ModelAPI:
    pytest.importorskip("transformers")
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.selector import Selector
    from support.tiny_decoder import decoder, tokenizer

    return HuggingFacePassageModel(decoder("llama"), tokenizer(), Adaptation(Selector(), top_k=2))


@pytest.fixture(scope="module", params=[load_model, passage_model], ids=["landmarks", "passages"])
def model(request: pytest.FixtureRequest) -> ModelAPI:
    return request.param()


class Library:
    """A memory `m`, and where it is published, `there`."""

    def __init__(self, path: Path, model: ModelAPI, memory: MemoryStore) -> None:
        self.model, self.url, self.memory = model, f"file://{path}/there", memory

    def write(self, name: str, text: str) -> None:
        mode: Any = "replace" if self.memory.has(name) else "new"
        self.model.ingest(Text(text, name), self.memory, mode=mode)

    def replace(self) -> None:
        """The mare has another price, and is shorter."""
        self.write("mare", f"{NEW} {FILL[:400]}")
        self.memory.publish(self.url, ["mare"], replace=True)

    def remove(self, name: str = "mare") -> None:
        unpublish(open_object_store(self.url), [name])

    def add(self) -> None:
        self.write("more", f"The price of the grey mare is 12. {FILL}")
        self.memory.publish(self.url, ["more"])


@pytest.fixture(scope="module")
def written(model: ModelAPI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the documents "mare" and "other"."""
    path = tmp_path_factory.mktemp("updates")
    with MemoryStore.create(path / "m", model.signature, selector=model.keeps) as memory:
        made = Library(path, model, memory)
        made.write("mare", f"{OLD} {FILL}")
        made.write("other", FILL)
        memory.publish(made.url)
    return path


@pytest.fixture
def library(tmp_path: Path, model: ModelAPI, written: Path) -> Iterator[Library]:
    """A copy of it."""
    for part in ("m", "there"):
        shutil.copytree(written / part, tmp_path / part)
    with MemoryStore.open(tmp_path / "m", model.signature) as memory:
        yield Library(tmp_path, model, memory)


def reader(library: Library, **options: Any) -> memstore.Memory:
    return memstore.open(library.url, library.model, options=options)


def look(memory: memstore.Memory) -> None:
    """Look for a newer manifest now."""
    memory.store._on_disk().catalog.database.refresh()


def texts(answer: Answer, name: str = "mare") -> str:
    """What is shown of a document's passages that were read."""
    return " ".join(source.text for source in answer.sources if source.document == name)


def within_a_minute(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# A reader follows


def test_an_open_reader_answers_from_what_is_published_now(library: Library) -> None:
    with reader(library, refresh=0.05) as memory:
        assert OLD in texts(memory.ask(QUESTION)) and memory.store.manifest == 1
        library.replace()
        assert within_a_minute(lambda: memory.store.manifest == 2)
        said = memory.ask(QUESTION)
        assert NEW in texts(said) and OLD not in texts(said)
        library.add()
        assert within_a_minute(lambda: memory.store.has("more"))
        assert "the grey mare" in texts(memory.ask("What of the grey mare?"), "more")
        library.remove()
        assert within_a_minute(lambda: not memory.store.has("mare"))
        assert {source.document for source in memory.ask(QUESTION).sources} <= {"other", "more"}
        assert {match.document for match in memory.search("the brown mare")} <= {"other", "more"}


def test_who_was_idle_looks_before_it_answers(library: Library) -> None:
    with reader(library, refresh=60.0) as memory:
        memory.ask(QUESTION)
        library.replace()
        assert OLD in texts(memory.ask(QUESTION))  # it has looked a moment ago
        memory.store._on_disk().catalog.database._looked -= 3600
        assert NEW in texts(memory.ask(QUESTION))


def test_a_store_that_takes_long_is_waited_for_by_one_ask_and_not_for_long(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_tables, "_PATIENCE", 0.2)
    place, go = WatchedPlace(open_object_store(library.url)), threading.Event()
    with open_at(place, refresh=60.0) as store:
        database = store._on_disk().catalog.database
        began: list[str] = []

        def hang(number: int, call: str, what: str) -> None:
            if call == "first":
                began.append(call)
                go.wait(60)

        place.before = hang
        library.remove()
        database._looked -= 3600
        for _ in range(3):
            assert store.has("mare")  # what is there is read on
        assert began == ["first"]  # by one of them
        go.set()
        assert within_a_minute(lambda: not store.has("mare"))


# What has begun


@pytest.mark.parametrize("change", [Library.replace, Library.remove], ids=["replaced", "removed"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_answer_is_finished_with_what_it_began_with(
    change: Callable[[Library], None], at: int, library: Library
) -> None:
    with reader(library, refresh=3600.0) as undisturbed:
        expected = undisturbed.ask(QUESTION, max_new_tokens=8, until_sentence=False)
    with reader(library, refresh=3600.0) as memory:
        pieces = library.model.asking(
            QUESTION, memory.store, max_new_tokens=8, until_sentence=False
        )
        for number in range(100):
            if number == at:
                change(library)
                look(memory)
            try:
                next(pieces)
            except StopIteration as end:
                said = end.value
                break
        if at:
            assert said.tokens == expected.tokens
            assert [(s.document, s.span, s.text) for s in said.sources] == [
                (s.document, s.span, s.text) for s in expected.sources
            ]
        assert OLD not in texts(memory.ask(QUESTION))


def test_a_chat_asks_what_is_published_by_then(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader(library, refresh=3600.0) as memory, library.model.chat(memory.store) as chat:
        assert OLD in texts(chat.ask(QUESTION))
        library.replace()
        library.add()
        look(memory)
        past = time.monotonic() + published_states.LEAVING
        monkeypatch.setattr(published_states, "time", SimpleNamespace(monotonic=lambda: past))
        look(memory)  # nothing stays of the old price
        said = chat.ask(QUESTION)
        assert NEW in texts(said) and OLD not in texts(said)
        assert "the grey mare" in texts(chat.ask("What of the grey mare?"), "more")
        library.remove()
        look(memory)
        assert "mare" not in {source.document for source in chat.ask(QUESTION).sources}
    with reader(library) as memory, library.model.chat(memory.store, ["more"]) as chat:
        chat.ask(QUESTION)
        library.remove("more")
        look(memory)
        with pytest.raises(DocumentNotFound, match="no document 'more'"):
            chat.ask(QUESTION)


def test_what_left_is_forgotten_in_time(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(library, refresh=3600.0) as memory:
        memory.ask(QUESTION)
        store = memory.store
        number = store.document("mare").id
        library.replace()
        look(memory)
        assert store.document("mare").id != number and number in store.readable()
        assert number not in {row.id for row in store.documents()}
        past = time.monotonic() + published_states.LEAVING
        monkeypatch.setattr(published_states, "time", SimpleNamespace(monotonic=lambda: past))
        look(memory)
        assert number not in store.readable()
        assert number not in store.retrieval._loaded
        with pytest.raises(DocumentNotFound):
            store.lease([BlockKey(number, 1, 0, 0)])


def test_what_left_and_was_pruned_is_told_as_that(library: Library) -> None:
    library.add()  # in a segment of its own
    with reader(library, refresh=3600.0, host_budget=1 << 20) as memory:
        store = memory.store
        (place,) = store.retrieval.stored_at([(store.document("more").id, 0)])
        assert place is not None
        number, layer, block = place[0], store.signature.memory_layers[0], place[1]
        library.remove("more")
        look(memory)
        with store.lease([BlockKey(number, layer, block, 0)]):
            pass  # it has read the index that leads to the rest
        prune(open_object_store(library.url), grace=-10.0)
        with pytest.raises(DocumentNotFound):
            store.lease([BlockKey(number, layer, block, 1)])
        assert [row.name for row in store.documents()] == ["mare", "other"]


def test_a_document_that_is_published_again_is_there_again(library: Library) -> None:
    with reader(library, refresh=3600.0) as memory:
        number = memory.store.document("mare").id
        library.remove()
        look(memory)
        assert not memory.store.has("mare")
        library.memory.publish(library.url)
        look(memory)
        assert memory.store.document("mare").id == number
        assert OLD in texts(memory.ask(QUESTION))


def test_a_new_manifest_costs_a_reader_what_changed(library: Library) -> None:
    with reader(library, refresh=3600.0) as memory:
        store = memory.store
        store.documents()
        catalog, read = store._on_disk().catalog, []
        row = catalog.row
        catalog.row = lambda txn, number: read.append(number) or row(txn, number)  # type: ignore[method-assign]
        catalog.documents = None  # type: ignore[method-assign,assignment]
        library.replace()
        look(memory)
        assert store.document("mare").tokens < store.document("other").tokens
        assert len(read) == 1


# Publishers at once


def test_all_that_publishers_do_at_once_is_done(tmp_path: Path) -> None:
    """Two push, one of them over a document of the other's, one removes, one merges and prunes."""
    url, rounds = f"file://{tmp_path}/there", 6
    one, two = (MemoryStore.create(tmp_path / name, SIGNATURE) for name in ("one", "two"))
    with one, two:
        ingest(one, "shared", 40)
        for number in range(rounds):
            ingest(one, f"gone {number}", 20, text=number + 20)
            ingest(one, f"one {number}", 40, text=number + 1)
            ingest(two, f"two {number}", 40, text=number + 10)
        one.publish(url, ["shared", *(f"gone {number}" for number in range(rounds))])
        place = open_object_store(url)

        def tend(number: int) -> None:
            with suppress(StoreUnavailable):  # "merge again"
                merge(place)
            prune(place, grace=3600.0)

        def replace(number: int) -> None:
            two.publish(url, [f"two {number}"])
            ingest(one, "shared", 40 + number, text=number + 40, mode="replace")
            one.publish(url, ["shared"], replace=True)

        works: list[Callable[[int], object]] = [
            lambda number: one.publish(url, [f"one {number}"]),
            replace,
            lambda number: unpublish(open_object_store(url), [f"gone {number}"]),
            tend,
        ]

        def repeat(work: Callable[[int], object]) -> None:
            for number in range(rounds):
                work(number)

        with ThreadPoolExecutor(len(works)) as pool:
            list(pool.map(repeat, works))
        there = {entry.row.name: entry.row for entry in Published.open(place).documents()}
        expected = {f"{who} {number}" for who in ("one", "two") for number in range(rounds)}
        assert there.keys() == expected | {"shared"}
        assert there["shared"].tokens == one.document("shared").tokens == 45
        assert verify_published(url).clean
