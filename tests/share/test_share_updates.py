"""Publications change while readers are open: readers follow without reopening, and an answer ends
with the documents it began with.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("obstore")

import memstore
from memstore import load_model
from memstore.model.answer import Answer
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import Text
from memstore.share import publication
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory

QUESTION = "What is the price of the brown mare?"
OLD, NEW = "The price of the brown mare is 310.", "The price of the brown mare is 777."
FILL = " ".join(f"Nobody saw the number {n} of the valley." for n in range(15))


def passage_model() -> ModelAPI:
    pytest.importorskip("transformers")
    from support.tiny_decoder import word_reader

    return word_reader(top_k=2)


@pytest.fixture(scope="module", params=[load_model, passage_model], ids=["landmarks", "passages"])
def model(request: pytest.FixtureRequest) -> ModelAPI:
    return request.param()


class Library:
    """A memory `m`, and where it is published, `there`."""

    def __init__(self, path: Path, model: ModelAPI, memory: MemoryStore) -> None:
        self.model, self.url, self.memory = model, f"file://{path}/there", memory

    def write(self, name: str, text: str) -> None:
        mode: Any = "replace" if self.memory.has(name) else "new"
        self.model.ingest(Text(text, name), self.memory, mode=mode, keep="kv")

    def replace(self) -> None:
        """The mare has another price, and is shorter."""
        self.write("mare", f"{NEW} {FILL[:400]}")
        publish_memory(self.memory, self.url, ["mare"], replace=True)

    def remove(self, name: str = "mare") -> None:
        unpublish(open_object_store(self.url), [name])

    def add(self) -> None:
        self.write("more", f"The price of the grey mare is 12. {FILL}")
        publish_memory(self.memory, self.url, ["more"])


@pytest.fixture(scope="module")
def written(model: ModelAPI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the documents "mare" and "other"."""
    path = tmp_path_factory.mktemp("updates")
    with MemoryStore.create(path / "m", model.signature, selector=model.keeps) as memory:
        made = Library(path, model, memory)
        made.write("mare", f"{OLD} {FILL}")
        made.write("other", FILL)
        publish_memory(memory, made.url)
    return path


@pytest.fixture
def library(tmp_path: Path, model: ModelAPI, written: Path) -> Iterator[Library]:
    """A copy of the library for one test."""
    for part in ("m", "there"):
        shutil.copytree(written / part, tmp_path / part)
    with MemoryStore.open(tmp_path / "m", model.signature) as memory:
        yield Library(tmp_path, model, memory)


def reader(library: Library, **options: Any) -> memstore.Memory:
    return memstore.open(library.url, library.model, options=options)


def look(memory: memstore.Memory) -> None:
    """Look for a newer manifest now."""
    memory.store._catalog.database.refresh()


def texts(answer: Answer, name: str = "mare") -> str:
    """The text of a document's passages that an answer cites."""
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
        assert OLD in texts(memory.ask(QUESTION, max_new_tokens=4)) and memory.store.manifest == 1
        library.replace()
        assert within_a_minute(lambda: memory.store.manifest == 2)
        said = memory.ask(QUESTION, max_new_tokens=4)
        assert NEW in texts(said) and OLD not in texts(said)
        library.add()
        assert within_a_minute(lambda: memory.store.has("more"))
        assert "the grey mare" in texts(
            memory.ask("What of the grey mare?", max_new_tokens=4), "more"
        )
        library.remove()
        assert within_a_minute(lambda: not memory.store.has("mare"))
        assert {source.document for source in memory.ask(QUESTION, max_new_tokens=4).sources} <= {
            "other",
            "more",
        }
        assert {match.document for match in memory.search("the brown mare")} <= {"other", "more"}


def test_an_idle_reader_checks_for_a_newer_manifest_before_it_answers(library: Library) -> None:
    with reader(library, refresh=60.0) as memory:
        memory.ask(QUESTION, max_new_tokens=4)
        library.replace()
        assert OLD in texts(memory.ask(QUESTION, max_new_tokens=4))  # it has looked a moment ago
        memory.store._catalog.database._looked -= 3600
        assert NEW in texts(memory.ask(QUESTION, max_new_tokens=4))


# Answers under way


@pytest.mark.parametrize(
    ("change", "at"),
    [(Library.replace, 0), (Library.remove, 1), (Library.replace, 5), (Library.remove, 5)],
    ids=["replaced-0", "removed-1", "replaced-5", "removed-5"],
)
def test_an_answer_ends_with_the_documents_it_began_with(
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
        assert OLD not in texts(memory.ask(QUESTION, max_new_tokens=4))


def test_a_chat_follows_what_is_published(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader(library, refresh=3600.0) as memory, library.model.chat(memory.store) as chat:
        assert OLD in texts(chat.ask(QUESTION, max_new_tokens=4))
        library.replace()
        library.add()
        look(memory)
        past = time.monotonic() + publication.LEAVING
        monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: past))
        look(memory)  # the old price is gone
        said = chat.ask(QUESTION, max_new_tokens=4)
        assert NEW in texts(said) and OLD not in texts(said)
        assert "the grey mare" in texts(
            chat.ask("What of the grey mare?", max_new_tokens=4), "more"
        )
        library.remove()
        look(memory)
        assert "mare" not in {
            source.document for source in chat.ask(QUESTION, max_new_tokens=4).sources
        }
