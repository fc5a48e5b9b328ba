"""A memory in one process, as users see it: open, write, resume, forget, export, import."""

import os
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.codec import CODECS
from memstore.disk.lmdb import environment
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    BudgetExceeded,
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryExists,
    MemoryNotFound,
    ReadOnlyMemory,
    StorageFull,
    WrongModel,
)
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from support.synthetic_documents import (
    BLOCK,
    BUDGET,
    CHUNK,
    CHUNK_BLOCKS,
    DIM,
    HEADS,
    OTHER_MODEL,
    SETTINGS,
    SIGNATURE,
    TOP_K,
    block,
    check_content,
    chunk,
    ingest,
    is_whole,
    opened,
    stored,
    token_ids,
)

UNIT_BYTES = 2 * BLOCK * DIM * 2


# Opening


def test_open_refuses_missing_and_foreign_memories(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryNotFound):
        MemoryStore.open(tmp_path)
    MemoryStore.create(path, SIGNATURE).close()
    with pytest.raises(MemoryExists):
        MemoryStore.create(path, SIGNATURE)
    with pytest.raises(WrongModel, match="weights"):
        MemoryStore.open(path, OTHER_MODEL)
    with pytest.raises(BudgetExceeded, match="raise"):
        MemoryStore.open(path, host_budget=UNIT_BYTES)
    with pytest.raises(BudgetExceeded):
        MemoryStore.create(tmp_path / "other", SIGNATURE, host_budget=10)
    assert not (tmp_path / "other").exists()
    with pytest.raises(InvalidInput, match="auto, packed"):
        MemoryStore.open(path, index="hnsw")
    with pytest.raises(InvalidInput, match="auto, packed"):
        MemoryStore.create(tmp_path / "other", SIGNATURE, index="hnsw")
    assert not (tmp_path / "other").exists()
    with MemoryStore.open(path, SIGNATURE) as store, pytest.raises(InvalidInput, match="new or"):
        store.write_document("book", source_hash="", settings=SETTINGS, mode="append")


# Writing


@pytest.mark.parametrize(
    "tokens", [0, 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7]
)
@pytest.mark.parametrize("commit_bytes", [1, 16 << 20])
def test_document_reads_back_bit_for_bit(path: Path, tokens: int, commit_bytes: int) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        document = ingest(store, "book", tokens, commit_bytes=commit_bytes)
        assert (document.state, document.tokens, document.name) == ("ready", tokens, "book")
        check_content(store, document, text=1)
    with opened(path, read_only=True) as store:
        assert store.documents() == [document]
        check_content(store, document, text=1)
        assert is_whole(store.path)


@pytest.mark.parametrize("codec", [name for name in CODECS if not CODECS[name].lossless])
def test_staged_blocks_of_a_lossy_codec_equal_stored_ones(path: Path, codec: str) -> None:
    tokens = 2 * CHUNK + BLOCK + 1
    with MemoryStore.create(path, SIGNATURE, codec=codec, host_budget=BUDGET) as store:
        writer = store.write_document("book", source_hash="x", settings=SETTINGS)
        number = writer.document.id
        for first in range(0, tokens, CHUNK):
            end = min(first + CHUNK, tokens)
            writer.add_chunk(
                token_ids(1, first, end), first, *chunk(1, first // BLOCK, end - first)
            )
        units = [
            BlockKey(number, layer, b, head)
            for layer in (1, 2)
            for b in range(writer.blocks)
            for head in (0, 1)
        ]
        with store.lease(units) as lease:
            staged = lease.k[lease.slots], lease.v[lease.slots]
        assert store.stats()["tiers"]["disk"]["hits"] == 0
        writer.finish()
    with opened(path) as store:
        with store.lease(units) as lease:
            assert torch.equal(lease.k[lease.slots], staged[0]) and torch.equal(
                lease.v[lease.slots], staged[1]
            )
        exact = torch.cat([block(1, layer, b)[1] for layer in (1, 2) for b in range(9)])
        assert not torch.equal(staged[1][: len(exact)], exact)


class Stop(Exception):
    pass


def interrupt_at(tokens: int, error: type[BaseException] = Stop):
    def after_chunk(done: int) -> None:
        if done >= tokens:
            raise error

    return after_chunk


@pytest.mark.parametrize(
    ("error", "commit_bytes"), [(KeyboardInterrupt, 1), (Stop, 5000), (KeyboardInterrupt, 16 << 20)]
)
def test_interrupted_ingest_resumes_to_equal_bytes(
    tmp_path: Path, error: type[BaseException], commit_bytes: int
) -> None:
    tokens = 70 * CHUNK + 6

    def interrupt(store: MemoryStore, at: int) -> None:
        after = interrupt_at(at, error)
        with pytest.raises(error):
            ingest(store, "book", tokens, commit_bytes=commit_bytes, after_chunk=after)

    with MemoryStore.create(tmp_path / "whole", SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", tokens, commit_bytes=16 << 20)
    with MemoryStore.create(tmp_path / "cut", SIGNATURE, host_budget=BUDGET) as store:
        interrupt(store, 20 * CHUNK)
        document = store.document("book")
        assert (document.state, document.tokens) == ("ingesting", 20 * CHUNK)
        with pytest.raises(DocumentNotFound):
            scope = [(document.id, 0, 1)]
            store.retrieval.landmarks(scope).keys(1, scope)
    with opened(tmp_path / "cut") as store:
        check_content(store, store.document("book"), text=1)
        assert is_whole(store.path)
        writer = store.write_document("book", source_hash=f"1:{tokens}", settings=SETTINGS)
        assert (writer.tokens, writer.blocks) == (20 * CHUNK, 20 * CHUNK_BLOCKS)
        for layer in range(3):
            latest = [block(1, layer, number) for number in (78, 79)]
            landmarks = writer.recent_landmarks(layer, TOP_K)
            assert torch.equal(landmarks, torch.stack([one[2] for one in latest]))
            units = [BlockKey(document.id, layer, b, head) for b in (78, 79) for head in (0, 1)]
            with store.lease(units) as lease:
                assert torch.equal(lease.k[lease.slots], torch.cat([one[0] for one in latest]))
        writer.close()
        interrupt(store, tokens)
        assert store.document("book").tokens == 70 * CHUNK
        check_content(store, ingest(store, "book", tokens, commit_bytes=commit_bytes), text=1)
    assert stored(tmp_path / "whole") == stored(tmp_path / "cut")


def test_ingest_is_idempotent_and_refuses_other_content(store: MemoryStore, path: Path) -> None:
    document = ingest(store, "book", 50)
    before = stored(path)
    assert ingest(store, "book", 50) == document and store.ready(["book", "book"]) == [document]
    with opened(path, read_only=True) as reader:
        assert ingest(reader, "book", 50) == document
    with pytest.raises(DocumentExists, match="replace"):
        ingest(store, "book", 51)
    with pytest.raises(Stop):
        ingest(store, "part", 5 * CHUNK, after_chunk=interrupt_at(CHUNK))
    with pytest.raises(DocumentExists, match="partly"):
        ingest(store, "part", 6 * CHUNK)
    with pytest.raises(InvalidInput, match="top_k=2"):
        store.write_document(
            "part", source_hash=f"1:{5 * CHUNK}", settings=replace(SETTINGS, top_k=3)
        )
    store.forget("part")
    assert stored(path) == before


def test_chunks_of_a_wrong_shape_are_refused(store: MemoryStore) -> None:
    layers, _ = chunk(1, 0, CHUNK)
    wrong = {**layers, 2: tuple(part.float() for part in layers[2])}
    with (
        pytest.raises(InvalidInput, match="expected"),
        store.write_document("book", source_hash="x", settings=SETTINGS) as writer,
    ):
        writer.add_chunk(token_ids(1, 0, CHUNK), 0, wrong)
    assert store.document("book").tokens == 0


def test_replacement_serves_the_old_document_until_complete(store: MemoryStore, path: Path) -> None:
    old = ingest(store, "book", 5 * CHUNK + 1, text=1)
    other = ingest(store, "other", 30, text=3)
    with pytest.raises(Stop):
        ingest(
            store, "book", 6 * CHUNK, text=2, mode="replace", after_chunk=interrupt_at(3 * CHUNK)
        )
    assert store.document("book") == old and len(store.documents()) == 2
    check_content(store, old, text=1)
    assert is_whole(store.path)
    with opened(path) as again:
        assert len(again.documents()) == 2
        done: list[int] = []
        new = ingest(again, "book", 6 * CHUNK, text=2, mode="replace", after_chunk=done.append)
        assert done == [4 * CHUNK, 5 * CHUNK, 6 * CHUNK]  # continued
        assert again.documents() == [other, new] or again.documents() == [new, other]
        check_content(again, new, text=2)
        with pytest.raises(DocumentNotFound):
            again.lease([BlockKey(old.id, 1, 0, 0)])
    with pytest.raises(DocumentNotFound):  # in the store that has the old one cached
        store.lease([BlockKey(old.id, 1, 0, 0)])
    check_content(store, store.document("book"), text=2)
    assert ingest(store, "book", 6 * CHUNK, text=2, mode="replace") == new

    def unchanged(done: int) -> None:
        check_content(store, new, text=2)

    newest = ingest(store, "book", 10, text=4, mode="replace", after_chunk=unchanged)
    check_content(store, newest, text=4)
    assert ingest(store, "fresh", 10, text=4, mode="replace").name == "fresh"
    assert is_whole(store.path)


# Forgetting


def test_new_metadata_keep_search_data_and_cached_blocks(store: MemoryStore, path: Path) -> None:
    """If they were dropped, a question in another thread would find the document gone."""
    document = ingest(store, "book", 3 * CHUNK)
    with opened(path) as reader:
        check_content(reader, document, text=1)
        disk = reader.tier_stats()["disk"]
        store.describe("book", {"shelf": "upper"})
        assert reader.document("book").metadata == {"shelf": "upper"}
        check_content(reader, document, text=1)
        assert reader.tier_stats()["disk"] == disk


def test_forgotten_document_cannot_be_read(store: MemoryStore, path: Path) -> None:
    before = stored(path)
    document = ingest(store, "secret", 4 * CHUNK + 3)
    kept = ingest(store, "kept", 2 * CHUNK, text=2)
    check_content(store, document, text=1)
    assert store.forget("secret") == document
    with pytest.raises(DocumentNotFound):
        store.lease([BlockKey(document.id, 1, 0, 0)])
    with pytest.raises(DocumentNotFound):
        scope = [(document.id, 0, 4)]
        store.retrieval.landmarks(scope).search(1, torch.zeros(HEADS, 1, DIM), scope, 1)
    with pytest.raises(DocumentNotFound):
        store.tokens(document.id)
    with pytest.raises(DocumentNotFound, match="'kept'"):
        store.forget("secret")
    check_content(store, kept, text=2)
    assert is_whole(store.path)
    store.forget("kept")
    assert stored(path) == before
    size, smaller = store.compact()
    assert smaller < size


def test_read_only_memory_refuses_writes(path: Path, tmp_path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 60)
        export_document(store, "book", tmp_path / "book.memdoc")
    with opened(path, read_only=True) as reader:
        check_content(reader, document, text=1)
        assert reader.verify().clean
        for change in (
            lambda: ingest(reader, "new", 10),
            lambda: reader.forget("book"),
            lambda: import_document(reader, tmp_path / "book.memdoc", "again"),
            reader.compact,
            lambda: reader.verify(repair=True),
        ):
            with pytest.raises(ReadOnlyMemory):
                change()
        check_content(reader, document, text=1)


# Budgets


@pytest.fixture
def small_map(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Memories that are opened have room for 147 pages, until it is undone."""
    monkeypatch.setattr(environment, "MAP_BYTES", 147 * 4096)
    return monkeypatch


def test_ingest_on_a_full_disk_stops_and_can_be_resumed(
    path: Path, small_map: pytest.MonkeyPatch
) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        first = ingest(store, "first", 10 * CHUNK)
        with pytest.raises(StorageFull, match="run the command again"):
            ingest(store, "second", 400 * CHUNK, text=2, commit_bytes=10_000)
        second = store.document("second")
        assert second.state == "ingesting"
        assert 0 < second.tokens < 400 * CHUNK and second.tokens % CHUNK == 0
        check_content(store, first, text=1)
        check_content(store, second, text=2)
        assert is_whole(store.path)
    small_map.undo()
    with opened(path) as store:
        check_content(store, ingest(store, "second", 400 * CHUNK, text=2), text=2)


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_ingest_that_finds_no_room_at_all_leaves_no_row(
    path: Path, mode: str, small_map: pytest.MonkeyPatch
) -> None:
    name = "first" if mode == "replace" else "second"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        first = ingest(store, "first", 10 * CHUNK)
        with pytest.raises(StorageFull, match="run the command again"):
            ingest(store, name, 4000 * CHUNK, text=2, mode=mode, commit_bytes=16 << 20)
        assert store.documents() == [first]
        check_content(store, first, text=1)
    with closing(Catalog.open(path)) as catalog, catalog.database.read() as txn:
        assert catalog.documents(txn) == [first]  # nor one that would have replaced it
    with MemoryStore.open(path) as store:
        check_content(store, ingest(store, name, 20 * CHUNK, text=3, mode=mode), text=3)
        assert is_whole(path)


# Scratch


def test_session_documents_live_in_memory_only() -> None:
    with MemoryStore.in_memory(SIGNATURE, host_budget=BUDGET) as store:
        assert store.documents() == []
        with store.retrieval.session_document() as own, store.retrieval.session_document() as other:
            assert own.document < 0 and other.document < 0 and own.document != other.document
            for layer in range(3):
                for first in (0, 4):
                    layers, _ = chunk(1, first, CHUNK)
                    assert own.add(layer, *layers[layer]) == first
            own.trim(3)
            assert own.blocks(1) == (3, 8)
            q = block(1, 1, 5)[2].float()[:, None]
            scope = [(own.document, 3, 8)]
            found = store.retrieval.landmarks(scope).search(1, q, scope, 5).candidates
            assert sorted(found[0, 0].tolist()) == [0, 1, 2, 3, 4]
            with store.lease([BlockKey(own.document, 1, 5, 1)]) as lease:
                assert torch.equal(lease.v[lease.slots[0]], block(1, 1, 5)[1][1])
            for gone in (BlockKey(own.document, 1, 2, 1), BlockKey(other.document, 1, 0, 0)):
                with pytest.raises(DocumentNotFound):
                    store.lease([gone])
            own.trim(99, layers=[0])
            assert own.blocks(0) == (8, 8) and own.blocks(2) == (3, 8)
            own.add(0, *chunk(1, 8, CHUNK)[0][0])
            assert own.blocks(0) == (8, 12)
        assert store.stats()["tiers"]["host"]["held"] == 0
        with pytest.raises(DocumentNotFound):
            store.retrieval.landmarks(scope).keys(1, scope)
        place = store.path
    assert place is not None and not place.exists()


def test_a_temporary_memory_is_removed_by_its_own_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BudgetExceeded):
        MemoryStore.in_memory(SIGNATURE, host_budget=1)
    assert not [*tmp_path.iterdir()]
    with MemoryStore.in_memory(SIGNATURE, host_budget=BUDGET) as store:
        child = os.fork()
        if not child:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [*tmp_path.iterdir()] == [store.path]
        ingest(store, "book", 100)
    assert not [*tmp_path.iterdir()]


# Export and import


def test_export_and_import_preserve_a_document(
    store: MemoryStore, path: Path, tmp_path: Path
) -> None:
    ingest(store, "unrelated", 10, text=9)
    document = ingest(store, "book", 80 * CHUNK + 5)
    file = tmp_path / "book.memdoc"
    assert export_document(store, "book", file) == file.stat().st_size
    with MemoryStore.create(tmp_path / "other", SIGNATURE, codec="raw") as other:
        imported = import_document(other, file)
        assert replace(imported, id=document.id) == replace(document, bytes=imported.bytes)
        check_content(other, imported, text=1)
        assert import_document(other, file) == imported
        check_content(other, import_document(other, file, "again"), text=1)
        assert is_whole(other.path)
        ingest(other, "taken", 10, text=5)
        with pytest.raises(DocumentExists):
            import_document(other, file, "taken")
        check_content(other, ingest(other, "book", 90 * CHUNK, mode="replace"), text=1)
    with pytest.raises(Stop):
        ingest(store, "part", 9 * CHUNK, text=2, after_chunk=interrupt_at(CHUNK))
    with pytest.raises(InvalidInput, match="partly"):
        export_document(store, "part", tmp_path / "part")
    with pytest.raises(InvalidInput):
        export_document(store, "book", tmp_path / "no such directory" / "file")


@pytest.mark.parametrize("there", ["data.mdb", "new", "text", "link", "device", "folder"])
def test_export_overwrites_nothing_but_an_export(
    store: MemoryStore, path: Path, tmp_path: Path, there: str
) -> None:
    document = ingest(store, "book", 50)
    (tmp_path / "text").write_text("my own words")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    file = (path if there in ("data.mdb", "new") else tmp_path) / there
    before = os.path.lexists(file) and os.lstat(file)
    with pytest.raises(InvalidInput, match="name a"):
        export_document(store, "book", file)
    assert (os.path.lexists(file) and os.lstat(file)) == before
    assert (tmp_path / "text").read_text() == "my own words"
    assert is_whole(path) and store.documents() == [document]


def test_import_of_another_models_document_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    ingest(store, "book", 6 * CHUNK + 5)
    export_document(store, "book", tmp_path / "book.memdoc")
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidInput):
            import_document(store, missing)
    with MemoryStore.create(tmp_path / "other", OTHER_MODEL) as other:
        with pytest.raises(WrongModel, match="weights"):
            import_document(other, tmp_path / "book.memdoc")
        assert other.documents() == []
