"""A memory with a selector stores, moves and verifies landmarks and words with their passages."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import IndexSpec
from memstore.errors import CorruptMemory, DocumentNotFound, WrongModel
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from memstore.store.verify import verify_memory
from support.passage_documents import check_content, ingest
from support.selected_documents import FORM, OTHER, PASSAGES, QUESTION, create, selected

TOKENS_ONLY = replace(FORM, words=False)


def test_forgotten_and_changed_documents_are_noticed(path: Path) -> None:
    with create(path) as writer, MemoryStore.open(path) as reader:
        ids = {
            number: ingest(writer, str(number), 4 * (4 + number), text=number).id
            for number in range(1, 5)
        }
        for document in reader.documents():
            check_content(reader, document, text=int(document.name))
        writer.forget("2")
        with pytest.raises(DocumentNotFound):
            reader.retrieval.selected.token_maxima(QUESTION, [(ids[2], 0, 4)])
        with pytest.raises(DocumentNotFound):
            reader.retrieval.selected.word_scores({7: 1.0}, [(ids[1], 0, 4), (ids[2], 0, 4)])
        ids[3] = ingest(writer, "3", 80, text=3, mode="replace").id
        check_content(reader, reader.document("3"), text=3)
        writer.compact()
        for document in (*reader.documents(), *writer.documents()):
            check_content(reader, document, text=int(document.name))
        left = {int.from_bytes(key[:8], "big") for key in selected(path)["landmarks"]}
        assert left == {ids[1], ids[3], ids[4]}


# Moving


@pytest.mark.parametrize("form", [OTHER, TOKENS_ONLY, replace(FORM, digest="other"), None])
def test_import_into_a_memory_of_another_selector_is_refused(
    tmp_path: Path, form: IndexSpec | None
) -> None:
    with create(tmp_path / "one") as one:
        ingest(one, "book", 20)
        export_document(one, "book", tmp_path / "file")
    with MemoryStore.create(tmp_path / "two", PASSAGES, selector=form) as two:
        with pytest.raises(WrongModel, match="selector"):
            import_document(two, tmp_path / "file")
        assert not two.documents()


# Checking


def problems(path: Path) -> list[str]:
    return [problem.what for problem in verify_memory(path).problems]


def test_verify_misses_no_run_that_is_missing_or_extra(path: Path) -> None:
    sound = path.with_name("sound")
    with create(sound) as store:
        ingest(store, "one", 300, commit_bytes=1 << 20)
        ingest(store, "two", 40, text=2, commit_bytes=1 << 20)
    catalog = Catalog.open(sound, read_only=True)
    with catalog.database.read() as txn:
        keys = [key for key, _ in txn.scan("landmarks")]
    catalog.close()
    assert len(keys) > 8
    for key in keys:
        memory = shutil.copytree(sound, path)
        changed = Catalog.open(memory)
        changed.database.write(lambda txn, key=key: txn.delete("landmarks", key))
        assert problems(memory), key
        changed.close()
        with MemoryStore.open(memory) as store, pytest.raises(CorruptMemory):
            for document in store.documents():
                check_content(store, document, text=1 + (document.name == "two"))
        shutil.rmtree(memory)
    memory = shutil.copytree(sound, path)
    changed = Catalog.open(memory)
    extra = keys[0][:8] + (4).to_bytes(2, "big") + keys[0][10:]
    changed.database.write(lambda txn: txn.put_checked("landmarks", extra, b"x"))
    changed.close()
    assert problems(memory)
