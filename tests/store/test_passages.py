"""Documents of passages have the same bits after any way of writing, exporting and publishing."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import IngestSettings
from memstore.disk.lmdb.transaction import tokens_key
from memstore.errors import CorruptMemory, InvalidInput
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document, publish_memory, pull_document
from support.passage_documents import (
    SETTINGS,
    add,
    check_content,
    ingest,
    kept,
    landmarks,
    passages,
    same,
)
from support.selected_documents import create, words
from support.synthetic_documents import BLOCK, BUDGET, SIGNATURE, is_whole, opened, stored

OF_PASSAGES = {"source_hash": "x", "settings": SETTINGS}


@pytest.fixture
def store(tmp_path: Path):
    with create(tmp_path / "memory", codec="raw") as store:
        yield store


@settings(max_examples=5)
@given(data=st.data())
def test_passages_read_back_from_directory_export_and_publication(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("passages")
    codec = data.draw(st.sampled_from(["raw", "zstd"]))
    text, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    stops = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    memory = path / "memory"
    for number, stop in enumerate(stops):  # killed, as far as what was committed goes
        with opened(memory) if number else create(memory, codec=codec) as store:
            writer = store.write_document(
                "a", source_hash=f"{text}:{count}", settings=SETTINGS, commit_bytes=1
            )
            with writer:
                if stop > writer.blocks:
                    add(writer, text, writer.blocks, stop)
            assert is_whole(memory)
            check_content(store, store.document("a"), text)
    with opened(memory) if stops else create(memory, codec=codec) as store:
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        document = ingest(store, "a", count, text=text, batches=sizes, commit_bytes=3000)
        check_content(store, document, text)
        export_document(store, "a", path / "file")
        publish_memory(store, f"file://{path}/published")
        store.compact()
        check_content(store, document, text)
    with create(path / "imported") as other, create(path / "pulled") as third:
        for store in (other, third):  # an ingest that committed nothing is begun anew, as the next
            for _ in range(document.id - 1):
                with store.write_document("a", source_hash="", settings=SETTINGS):
                    pass
        check_content(other, import_document(other, path / "file"), text)
        check_content(third, pull_document(third, "a", f"file://{path}/published"), text)
    with opened(f"file://{path}/published") as away:
        check_content(away, away.document("a"), text)
        assert away.verify().clean
    same_rows = [stored(path / name) for name in ("memory", "imported", "pulled")]
    assert same_rows[0] == same_rows[1] == same_rows[2]
    assert all(is_whole(path / name) for name in ("memory", "imported", "pulled"))
    shutil.rmtree(path)


def test_a_range_of_passages_of_a_document_is_read(store) -> None:
    document = ingest(store, "a", 20)
    assert document.memory_layers(store.signature) == [0] and is_whole(store.path)
    assert same(store.passages("a", 3, 9), passages(1, 3, 9)) and not store.passages("a", 99)


@pytest.mark.parametrize(
    "change",
    [
        {"kv": kept(1, 1, 2)},
        {"kv": [tuple(half[:1] for half in kept(1, 0, 1)[0])]},
        {"kv": [tuple(half.float() for half in kept(1, 0, 1)[0])]},
        {"kv": [tuple(half / 0 for half in kept(1, 0, 1)[0])]},
        {"landmarks": None},
        {"landmarks": landmarks(1, 0, 2)},
        {"words": words(1, 0, 2)},
    ],
)
def test_an_inconsistent_batch_of_passages_is_refused(store, change) -> None:
    given = {
        "passages": passages(1, 0, 1),
        "kv": kept(1, 0, 1),
        "landmarks": landmarks(1, 0, 1),
        "words": words(1, 0, 1),
    }
    with store.write_document("a", **OF_PASSAGES) as writer:
        with pytest.raises(InvalidInput) as caught:
            writer.add_passages(**{**given, **change})
        assert "\n" not in str(caught.value)
        writer.add_passages(**given)


def test_settings_and_memories_without_passages_are_refused(store, tmp_path) -> None:
    for wrong in (
        replace(SETTINGS, passage_tokens=BLOCK + 1),
        replace(SETTINGS, passage_tokens=0),
        replace(SETTINGS, chunk_blocks=4),
    ):
        with pytest.raises(InvalidInput):
            store.write_document("a", source_hash="x", settings=wrong)
    other = MemoryStore.create(tmp_path / "landmarks", SIGNATURE, host_budget=BUDGET)
    with other, pytest.raises(InvalidInput, match="selector"):
        other.write_document("a", **OF_PASSAGES)
    with pytest.raises(InvalidInput, match="passages"):
        store.write_document("a", source_hash="x", settings=IngestSettings())
    with pytest.raises(InvalidInput, match="one record a passage"):
        create(tmp_path / "layers", signature=SIGNATURE)
    assert not (tmp_path / "layers").exists()


@pytest.mark.parametrize("gone", [0, 3, 4, 9, 12])
def test_missing_parts_of_a_document_are_noticed(store, gone: int) -> None:
    document = ingest(store, "a", 10)  # parts at 0, 3, 4, 9
    database = store._catalog.database
    database.write(lambda txn: txn.delete("tokens", tokens_key(document.id, gone)))
    whole = gone == 12
    assert is_whole(store.path) == whole
    if not whole:
        with pytest.raises(CorruptMemory):
            store.passages("a", gone, gone + 1)
        with pytest.raises(CorruptMemory):
            export_document(store, "a", store.path.parent / "file")
