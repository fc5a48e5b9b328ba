"""The Python API, `memstore.open`, with the small model that ships."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.errors import DocumentNotFound, InvalidInput, MemstoreError, WrongModel
from memstore.model.model_api import Detokenizer
from memstore.store.open_options import OpenOptions
from memstore.store.transfer import export_document, import_document, pull_document
from support.diary import DIARY
from support.fake_device import FakeDevice
from support.paths import ROOT

BARN = "What is the combination of the lime barn? The combination of the lime barn is"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with the diary in it."""
    path = tmp_path_factory.mktemp("memory") / "memory"
    with memstore.open(path, model="books-1m", device="cpu") as memory:
        memory.add(text=DIARY, name="diary", labels={"author": "nobody", "year": 1921})
    return path


def test_a_memory_is_made_filled_and_asked_and_knows_its_model_in_the_next_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_MODEL", "/nowhere")  # which is for new memories
    with memstore.open(str(path), device="cpu") as memory:
        assert repr(memory) == f"<memstore.Memory {path} of books-1m>"
        answer = memory.ask(BARN)
        assert answer.text == "4467" == str(answer)
        assert answer.sources[0].document == "diary"
        assert [row.name for row in memory.documents()] == ["diary"]


def test_files_folders_and_texts_are_added_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes" / "deep"
    notes.mkdir(parents=True)
    for name in ("one", "two"):
        (notes / f"{name}.txt").write_text(f"The number of {name} is 4{len(name)}1. " * 3)
    seen = []
    with memstore.open(tmp_path / "memory", "books-1m", device="cpu") as memory:
        added = memory.add(tmp_path / "notes", progress=seen.append)
        assert [row.name for row in added] == ["deep/one.txt", "deep/two.txt"] and seen
        again = memory.add([str(notes / "one.txt"), notes / "two.txt"])
        assert [row.name for row in again] == ["one.txt", "two.txt"]
        assert memory.add(notes / "one.txt") == again[:1]
        assert memory.add(notes / f"{name}.txt" for name in ("one", "two")) == again
        memory.add(text="Another text stands here now.", name="one.txt", replace=True)
        with pytest.raises(memstore.MemstoreError, match="one"):
            memory.add(text="And another one.", name="one.txt")
        for wrong in ({}, {"paths": "x.txt", "text": "y", "name": "z"}, {"text": "no name"}):
            with pytest.raises(InvalidInput):
                memory.add(**wrong)
        with pytest.raises(DocumentNotFound):
            memory.remove("one.txt", "nobody")
        assert len(memory.remove("one.txt", "two.txt", "one.txt")) == 2
        assert [row.name for row in memory.documents()] == ["deep/one.txt", "deep/two.txt"]


def test_a_tilde_is_the_home_directory(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "diary.txt").write_text(DIARY)
    (home / "model").symlink_to(model_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    with memstore.open("~/memory", "~/model", device="cpu") as memory:
        (document,) = memory.add("~/diary.txt")
        export_document(memory.store, "diary.txt", "~/diary.memstore")
        memory.remove("diary.txt")
        assert import_document(memory.store, "~/diary.memstore").name == document.name
        memory.publish("file://~/published")
    monkeypatch.setenv("MEMSTORE_MODEL", "~/model")
    with memstore.open("~/new", device="cpu") as memory:
        pull_document(memory.store, "diary.txt", "file://~/published")
        memory.reader.ingest(Path("~/diary.txt"), memory.store, name="again")
    cached: OpenOptions = {"local_cache": "~/cache"}
    with memstore.open("file://~/published", "~/model", device="cpu", options=cached) as memory:
        assert [row.name for row in memory.documents()] == ["diary.txt"]
    assert memstore.MemoryStore.open(Path("~/new"), read_only=True).path == home / "new"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_broken_files_of_a_folder_do_not_stop_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "a.txt").write_text("The gate of the mill is open on Sundays. " * 3)
    (folder / "b.pdf").write_bytes(b"%PDF-1.7 and no more")
    (folder / "c.txt").write_text("The gate of the barn is open on Mondays. " * 3)
    with memstore.open(tmp_path / "memory", "books-1m", device="cpu") as memory:
        wrong: list[memstore.MemstoreError] = []
        added = memory.add(folder, on_error=wrong.append)
        assert [row.name for row in added] == ["a.txt", "c.txt"] and len(wrong) == 1
        memory.add(tmp_path / "none.txt", on_error=wrong.append)
        assert "none.txt" in str(wrong[1])
        with pytest.raises(memstore.errors.UnreadableDocument, match=r"b\.pdf"):
            memory.add(folder)
        (folder / "a.txt").write_text("Another text of that name. " * 3)
        (folder / "d.txt").write_text("The gate of the yard is never open. " * 3)
        wrong.clear()
        added = memory.add(folder, on_error=wrong.append)
        assert [row.name for row in added] == ["c.txt", "d.txt"]
        assert {type(one).__name__ for one in wrong} == {"DocumentExists", "UnreadableDocument"}


@pytest.mark.parametrize("value", [2**64, float("nan"), "\ud800"])
def test_a_label_that_cannot_be_stored_is_refused(path: Path, value: object) -> None:
    with memstore.open(path, device="cpu") as memory:
        with pytest.raises(InvalidInput, match="not plain"):
            memory.add(text="The gate is green.", name="gate", labels={"value": value})
        assert not memory.store.has("gate")


def test_labels_stay_with_a_document_until_others_are_given(path: Path) -> None:
    with memstore.open(path, device="cpu") as memory:
        (before,) = memory.documents()
        assert before.labels == {"author": "nobody", "year": 1921}
        assert memory.add(text=DIARY, name="diary")[0].labels == before.labels
        uploaded = memory.reader.ingest("Less.", memory.store, name="diary", mode="replace")
        other = memory.add(text=DIARY + "More.", name="diary", replace=True)[0]
        assert uploaded.labels == other.labels == before.labels
        assert memory.add(text=DIARY + "More.", name="diary", labels={"a": 1})[0].labels == {"a": 1}
        assert memory.label("diary", {}).labels == {}
        memory.add(text=DIARY, name="diary", replace=True, labels=before.labels)
        assert repr(memory.documents()[0]).startswith("<Document 'diary': ready, ")
        for wrong in ("a", {"a": {"b": 1}}, {1: 2}, {"a": [1]}):
            with pytest.raises(InvalidInput, match="labels must map names"):
                memory.label("diary", wrong)
            with pytest.raises(InvalidInput, match="labels must map names"):
                memory.add(text="Not read.", name="new", labels=wrong)
        assert [row.name for row in memory.documents()] == ["diary"]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda memory: memory.ask("Who?", documents=[]), "None asks all"),
        (lambda memory: memory.ask("Who?", documents=5), "documents is 5; give a list of names"),
        (lambda memory: memory.ask("Who?", max_tokens=5), "max_new_tokens"),
        (lambda memory: memory.ask("Who?", where="year"), "where must be a dict of labels"),
        (lambda memory: memory.ask("Who?", where={"yaer": 1}), "author, year"),
        (lambda memory: memory.search("Who?", documents=["x"], where={}), "no document 'x'"),
        (lambda memory: memory.documents(5), "where must be a dict of labels"),
        (lambda memory: memory.ask_many("Who?"), "in a list"),
        (lambda memory: memory.ask_many(5), "in a list"),
        (lambda memory: memory.ask_many(["Who?"], together=1.5), "together must be at least 1"),
        (lambda memory: memory.remove(memory.documents()[0].id), r"a str, not \d"),
        (lambda memory: memory.publish(5), "5: not a URL"),
        (lambda memory: memory.add(text="Open.", name=5), "name is a str, not 5"),
        (lambda memory: memory.add(None), "give a path"),
        (lambda memory: memory.add(b"The gate is open."), r"text=data\.decode\(\)"),
        (lambda memory: memory.add([b"diary.txt"]), r"not b'diary.txt'; .*data\.decode"),
        (lambda memory: memory.add(text=b"Open.", name="x"), "not bytes: decode it"),
        (lambda memory: memory.add(path for path in [100]), "not 100;"),
        (lambda memory: memory.add("The gate is open. " * 99), "cannot read The gate .* too long"),
        (lambda memory: memstore.open(5), "a path is a str .* not 5"),
        (lambda memory: memstore.open("\ud800"), "cannot be a path"),
        (lambda memory: memstore.open("a" * 300), "aaa.* is too long for a path; shorten it"),
        (lambda memory: memstore.wrap(5, 5), r"5 is no model; call wrap\(model"),
        (lambda memory: memstore.open(memory.store.path, model=object()), "memstore.wrap"),
        (lambda memory: memstore.open(memory.store.path, options=5), "options is 5; give a dict"),
        (lambda memory: memstore.open(memory.store.path, options={"cach": 1}), "local_cache"),
        (lambda memory: memstore.open(memory.store.path, options={"host_budget": "1"}), "number"),
        (lambda memory: memstore.open(memory.store.path.parent), "is not empty"),
    ],
)
def test_misuse_of_the_python_api_is_explained(path: Path, ask: Any, said: str) -> None:
    with memstore.open(path, device="cpu") as memory, pytest.raises(MemstoreError, match=said):
        ask(memory)


def test_opening_a_published_directory_names_the_url_to_use(path: Path, tmp_path: Path) -> None:
    with memstore.open(path, device="cpu") as memory:
        memory.publish(f"file://{tmp_path}/published")
    with pytest.raises(InvalidInput, match=f"file://{tmp_path}/published"):
        memstore.open(tmp_path / "published")
    with memstore.open(f"file://{tmp_path}/published", device="cpu") as memory:
        assert memory.ask(BARN).text == "4467"


def test_labels_select_the_documents_to_ask(path: Path) -> None:
    with memstore.open(path, device="cpu") as memory:
        memory.add(text="The combination of the lime barn is 1111. " * 4, name="forged")
        assert [row.name for row in memory.documents({"year": 1921})] == ["diary"]
        assert memory.ask(BARN, where={"author": "nobody"}).text == "4467"
        assert memory.ask(BARN, documents=(name for name in ["diary"])).text == "4467"
        found = memory.search("lime barn", where={"author": "nobody"}, top_k=9)
        assert {source.document for source in found} == {"diary"}
        for ask in (memory.ask, memory.search):
            with pytest.raises(InvalidInput, match="labels"):
                ask("What?", where={"author": "somebody"})
        memory.remove("forged")


def test_a_label_true_is_no_label_1(path: Path) -> None:
    with memstore.open(path, device="cpu") as memory:
        for label, other in ((1, True), (True, 1), (0, False)):
            memory.add(text="The gate is green.", name="gate", labels={"read": label})
            assert memory.documents({"read": label}) and not memory.documents({"read": other})
            memory.label("gate", {"read": other})
            assert memory.documents({"read": other}) and not memory.documents({"read": label})
        assert memory.documents({"year": 1921.0})
        memory.remove("gate")


def test_ask_many_gives_the_same_answers_as_single_questions(path: Path) -> None:
    asked = [BARN, "What is the price of the brown mare? The price of the brown mare is", "Who?"]
    with memstore.open(path, device="cpu") as memory:
        alone = [memory.ask(question).text for question in asked]
        assert [answer.text for answer in memory.ask_many(asked, together=2)] == alone
        assert [answer.text for answer in memory.ask_many(iter(asked), together=2)] == alone
        assert memory.ask_many([]) == []
        with pytest.raises(InvalidInput, match="together"):
            memory.ask_many(asked, together=0)
        with pytest.raises(InvalidInput, match="empty"):
            memory.ask_many([BARN, " "])


def test_a_stream_gives_whole_characters_and_then_the_answer(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "memory", "books-1m", device="cpu") as memory:
        memory.add(text="The price of the brown mare is 310 €. " * 6, name="mare")
        question = "What is the price of the brown mare? The price of the brown mare is"
        # random bytes: some begin a character that the next ones end
        how = {"until_sentence": False, "max_new_tokens": 60, "temperature": 4.0, "seed": 3}
        with memory.stream(question, **how) as pieces:
            with pytest.raises(InvalidInput, match="last piece"):
                pieces.answer  # noqa: B018 (raises)
            said = list(pieces)
        whole = memory.ask(question, **how).text
        assert all(said) and "".join(said) == whole == pieces.answer.text
        assert len(whole) < len(whole.encode()) and len(said) > 5
        cut, ids = Detokenizer(memory.reader.tokenizer), memory.reader.tokenizer.encode("310 €")
        assert "".join(map(cut.add, ids[:-1])) + cut.rest() == "310"
        with memory.stream(question) as pieces:
            next(pieces)  # left early: the memory answers on
        assert memory.ask(question).text == memory.ask(question).text


def test_another_model_is_refused_by_its_name(path: Path, model_path: Path) -> None:
    with pytest.raises(WrongModel, match=r"was made with books-1m; this is tiny") as raised:
        memstore.open(path, model=model_path, device="cpu")
    assert any(line.startswith("weights") for line in raised.value.differences)
    loaded = memstore.load_model(model_path)
    with pytest.raises(WrongModel):
        memstore.open(path, model=loaded)
    with pytest.raises(memstore.MemstoreError, match="device"):
        memstore.open(path, device="tpu9")


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_threads_spin_briefly_unless_a_user_says_how(
    given: dict[str, str], spins: str | None
) -> None:
    names = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    code = "import memstore, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True)
    assert said == f"{spins}\n"


def test_a_model_on_a_device_has_its_blocks_there(tmp_path: Path) -> None:
    with FakeDevice(), memstore.open(tmp_path / "memory", "books-1m", device="cuda") as memory:
        memory.add(text=DIARY, name="diary")
        assert memory.reader.device.type == "cuda"
        assert memory.ask(BARN).text == "4467"
        assert [answer.text for answer in memory.ask_many([BARN, BARN])] == ["4467", "4467"]
        assert memory.store.tier_stats()["device"]["hits"] > 0
    with memstore.open(tmp_path / "memory") as memory:  # "auto": there is no GPU here
        assert memory.reader.device.type == "cpu" and memory.ask(BARN).text == "4467"
