"""A memory as its users see it: opening, writing, continuing, forgetting, moving and checking; many
processes.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.codec import CODECS
from memstore.disk.lmdb import environment
from memstore.disk.lmdb.database import Database
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    BudgetExceeded,
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryClosed,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    ReadOnlyMemory,
    StorageFull,
    WrongModel,
)
from memstore.store.memory_store import MemoryStore
from memstore.store.verify import verify_memory
from support.fork_server import RIGHT, SEVERAL, ForkServer
from support.synthetic_documents import (
    BLOCK,
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
    stored,
    token_ids,
)

UNIT_BYTES = 2 * BLOCK * DIM * 2
BUDGET = 1 << 20
KILLS = 4
SECONDS = 100  # until a test that waits has failed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def store(path: Path) -> MemoryStore:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as opened:
        yield opened


def opened_tables(path: Path) -> AbstractContextManager[Catalog]:
    """The tables of a memory, beside whatever has it open in this process."""
    return closing(Catalog.open(path))


def reopened(path: Path, **options: object) -> MemoryStore:
    return MemoryStore.open(path, SIGNATURE, **{"host_budget": BUDGET, **options})


@pytest.fixture
def elsewhere(children: ForkServer, tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in another process; gives what it printed."""

    def run(code: str, *arguments: object) -> str:
        assert children.run("python_job", tmp_path / "printed", code, *arguments) == RIGHT
        return (tmp_path / "printed").read_text()

    return run


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
    MemoryStore.open(path, SIGNATURE).close()


def test_closed_store_raises(path: Path) -> None:
    store = MemoryStore.create(path, SIGNATURE)
    store.close()
    store.close()
    for call in (
        store.documents,
        lambda: store.retrieval.session_document(),
        lambda: store.lease([]),
        store.stats,
    ):
        with pytest.raises(MemoryClosed):
            call()


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
    with reopened(path, read_only=True) as store:
        assert store.documents() == [document]
        check_content(store, document, text=1)
        assert is_whole(store.path)


def test_stored_bytes_do_not_depend_on_commit_sizes(tmp_path: Path) -> None:
    tokens = 70 * CHUNK + 9  # several runs of landmark keys
    for name, commit_bytes in (("a", 1), ("b", 20_000), ("c", 16 << 20)):
        with MemoryStore.create(tmp_path / name, SIGNATURE, host_budget=8 << 20) as store:
            ingest(store, "book", tokens, commit_bytes=commit_bytes)
    assert stored(tmp_path / "a") == stored(tmp_path / "b") == stored(tmp_path / "c")


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
    with reopened(path) as store:
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
    with MemoryStore.create(tmp_path / "whole", SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", tokens, commit_bytes=16 << 20)
    with MemoryStore.create(tmp_path / "cut", SIGNATURE, host_budget=BUDGET) as store:
        with pytest.raises(error):
            ingest(
                store,
                "book",
                tokens,
                commit_bytes=commit_bytes,
                after_chunk=interrupt_at(20 * CHUNK, error),
            )
        document = store.document("book")
        assert (document.state, document.tokens) == ("ingesting", 20 * CHUNK)
        with pytest.raises(DocumentNotFound):
            store.retrieval.landmark_keys(1, [(document.id, 0, 1)])
    with MemoryStore.open(tmp_path / "cut", host_budget=BUDGET) as store:
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
        with pytest.raises(error):
            ingest(
                store,
                "book",
                tokens,
                commit_bytes=commit_bytes,
                after_chunk=interrupt_at(tokens, error),
            )
        assert store.document("book").tokens == 70 * CHUNK
        check_content(store, ingest(store, "book", tokens, commit_bytes=commit_bytes), text=1)
    assert stored(tmp_path / "whole") == stored(tmp_path / "cut")


def test_ingest_is_idempotent_and_refuses_other_content(store: MemoryStore, path: Path) -> None:
    document = ingest(store, "book", 50)
    before = stored(path)
    assert ingest(store, "book", 50) == document
    with reopened(path, read_only=True) as reader:
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
    with pytest.raises(InvalidInput, match="choose new or replace"):
        ingest(store, "part", 5 * CHUNK, mode="append")
    store.forget("part")
    assert stored(path) == before


def test_chunks_of_a_wrong_shape_are_refused(store: MemoryStore) -> None:
    layers, _ = chunk(1, 0, CHUNK)
    with store.write_document("book", source_hash="x", settings=SETTINGS) as writer:
        with pytest.raises(InvalidInput, match="layers"):
            writer.add_chunk(token_ids(1, 0, CHUNK), 0, {1: layers[1]})
        with pytest.raises(InvalidInput, match="tokens"):
            writer.add_chunk(token_ids(1, 0, CHUNK - 1), 0, layers)
        with pytest.raises(InvalidInput, match="expected"):
            writer.add_chunk(
                token_ids(1, 0, CHUNK), 0, {**layers, 2: tuple(part.float() for part in layers[2])}
            )
        writer.add_chunk(token_ids(1, 0, 6), 0, *chunk(1, 0, 6))
        with pytest.raises(InvalidInput, match="only the last one is short"):
            writer.add_chunk(token_ids(1, 0, CHUNK), 0, layers)
    assert store.document("book").tokens == 0


def test_replacement_serves_the_old_document_until_complete(store: MemoryStore, path: Path) -> None:
    old = ingest(store, "book", 5 * CHUNK + 1, text=1)
    other = ingest(store, "other", 30, text=3)

    def still_old(done: int) -> None:
        assert store.document("book") == old and len(store.documents()) == 2
        check_content(store, old, text=1)

    with pytest.raises(Stop):
        ingest(
            store, "book", 6 * CHUNK, text=2, mode="replace", after_chunk=interrupt_at(3 * CHUNK)
        )
    still_old(0)
    assert is_whole(store.path)
    with reopened(path) as again:
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
    newest = ingest(
        store,
        "book",
        10,
        text=4,
        mode="replace",
        after_chunk=lambda done: check_content(store, new, text=2),
    )
    check_content(store, newest, text=4)
    assert ingest(store, "fresh", 10, text=4, mode="replace").name == "fresh"
    assert is_whole(store.path)


# Forgetting


def test_forgotten_document_cannot_be_read(store: MemoryStore, path: Path) -> None:
    before = stored(path)
    document = ingest(store, "secret", 4 * CHUNK + 3)
    kept = ingest(store, "kept", 2 * CHUNK, text=2)
    check_content(store, document, text=1)
    assert store.forget("secret") == document
    with pytest.raises(DocumentNotFound):
        store.lease([BlockKey(document.id, 1, 0, 0)])
    with pytest.raises(DocumentNotFound):
        store.retrieval.search_landmarks(1, torch.zeros(HEADS, 1, DIM), [(document.id, 0, 4)], 1)
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


def test_forgetting_in_another_process_is_noticed(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 3 * CHUNK)
    units = [BlockKey(document.id, 1, 2, 0)]
    lease = store.lease(units)
    elsewhere("with MemoryStore.open(arguments[0]) as store: store.forget('book')", path)
    # what is leased stays as it is
    assert torch.equal(lease.k[lease.slots[0]], block(1, 1, 2)[0][0])
    for read in (
        lambda: store.lease(units),
        lambda: store.retrieval.search_landmarks(
            1, torch.zeros(HEADS, 1, DIM), [(document.id, 0, 4)], 1
        ),
        lambda: store.retrieval.landmark_keys(1, [(document.id, 0, 4)]),
        lambda: store.document("book"),
    ):
        with pytest.raises(DocumentNotFound):
            read()
    lease.release()


# Processes and threads


def test_reader_sees_commits_of_another_process(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    with reopened(path, read_only=True) as reader:
        assert reader.documents() == []
        elsewhere("with MemoryStore.open(arguments[0]) as store: ingest(store, 'book', 100)", path)
        check_content(reader, reader.document("book"), text=1)
        elsewhere(
            "with MemoryStore.open(arguments[0]) as store: ingest(store, 'book', 400, "
            "mode='replace')",
            path,
        )
        assert reader.document("book").tokens == 400
        check_content(reader, reader.document("book"), text=1)


@pytest.mark.parametrize("one_store", [True, False])
def test_documents_are_written_concurrently(path: Path, one_store: bool) -> None:
    sizes = {text: (10 + 4 * text) * CHUNK + text for text in range(1, 5)}
    begun = threading.Barrier(len(sizes))
    failures: list[BaseException] = []
    with (
        MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store,
        nullcontext(store) if one_store else reopened(path) as other,
    ):

        def write(text: int) -> None:
            def together(done: int) -> None:  # nobody ends before everybody has committed
                if done == 2 * CHUNK:
                    begun.wait(SECONDS)

            try:
                ingest(
                    store if text % 2 else other,
                    f"book {text}",
                    sizes[text],
                    text=text,
                    commit_bytes=1 if text < 3 else 5000,
                    after_chunk=together,
                )
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=write, args=(text,)) for text in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for text, tokens in sizes.items():
            for reader in (store, other):
                document = reader.document(f"book {text}")
                assert (document.state, document.tokens) == ("ready", tokens)
                check_content(reader, document, text)
    assert is_whole(path)


def test_document_has_one_writer_at_a_time(store: MemoryStore, path: Path) -> None:
    ingest(store, "two", 10)
    with (
        reopened(path) as again,
        store.write_document("one", source_hash="x", settings=SETTINGS) as writer,
        store.write_document("two", source_hash="x", settings=SETTINGS, mode="replace"),
    ):
        for one in (store, again):
            for name in ("one", "two"):
                for mode in ("new", "replace"):
                    with pytest.raises(MemoryLocked, match="this process"):
                        one.write_document(name, source_hash="y", settings=SETTINGS, mode=mode)
                with pytest.raises(MemoryLocked, match="this process"):
                    one.forget(name)
        with pytest.raises(MemoryLocked, match="this process"):
            again.verify(repair=True)
        ingest(again, "three", 10, text=3)
        again.forget("three")
        writer.add_chunk(token_ids(1, 0, CHUNK), 0, chunk(1, 0, CHUNK)[0])
        check_content(store, writer.finish(), text=1)
        assert ingest(again, "one", CHUNK + 5, mode="replace").state == "ready"
    store.forget("one")
    store.forget("two")
    assert store.documents() == []


def test_other_writers_leave_a_running_import_alone(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "book.memdoc"
    ingest(store, "book", 40 * CHUNK)
    store.export_document("book", file)
    store.forget("book")
    write = Database.write
    states: list[str] = []

    def write_another_after_the_first(database: Database, work, **options):
        result = write(database, work, **options)
        if not states:
            states.append(store.document("book").state)
            ingest(store, "beside", 20, text=2)
        return result

    monkeypatch.setattr(Database, "write", write_another_after_the_first)
    check_content(store, store.import_document(file), text=1)
    check_content(store, store.document("beside"), text=2)
    assert states == ["ingesting"] and is_whole(store.path)


def test_killed_writers_leave_documents_absent_resumable_or_ready(
    children: ForkServer, path: Path
) -> None:
    MemoryStore.create(path, SIGNATURE).close()
    states: set[str] = set()
    for trial in range(KILLS):
        children.kill(0.02 + 0.05 * trial, "several_job", path)  # wherever that is
        assert is_whole(path)
        with reopened(path) as store:
            for document in store.documents():
                states.add(document.state)
                assert document.state == "ready" or document.tokens % CHUNK == 0
                check_content(store, document, text=int(document.name))
    assert children.run("several_job", path) == RIGHT
    with reopened(path) as store:
        assert [d.state for d in store.documents()] == ["ready"] * len(SEVERAL)
        for document in store.documents():
            assert document.tokens == SEVERAL[int(document.name)]
            check_content(store, document, text=int(document.name))


def test_read_only_memory_refuses_writes(path: Path, tmp_path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 60)
        store.export_document("book", tmp_path / "book.memdoc")
    with reopened(path, read_only=True) as reader:
        check_content(reader, document, text=1)
        assert reader.verify().clean
        for change in (
            lambda: ingest(reader, "new", 10),
            lambda: reader.forget("book"),
            lambda: reader.import_document(tmp_path / "book.memdoc", "again"),
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


def test_ingest_without_room_stops_and_is_resumed_once_there_is(
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
    with MemoryStore.open(path, host_budget=BUDGET) as store:
        check_content(store, ingest(store, "second", 400 * CHUNK, text=2), text=2)


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_ingest_without_room_leaves_no_row(
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


def test_an_error_of_the_encoder_ends_the_writing_after_what_came_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = BlockTable.encode

    def fail(*arguments):
        if arguments[1].block == 3 * CHUNK_BLOCKS:
            raise MemoryError("no room for records")
        return encode(*arguments)

    with MemoryStore.create(path, SIGNATURE) as store:
        with monkeypatch.context() as patched:
            patched.setattr(BlockTable, "encode", fail)
            with pytest.raises(MemoryError, match="no room for records"):
                ingest(store, "book", 9 * CHUNK, commit_bytes=1)
        document = store.document("book")
        assert document.state == "ingesting" and document.blocks == 3 * CHUNK_BLOCKS
        check_content(store, ingest(store, "book", 9 * CHUNK), text=1)


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
            assert store.retrieval.search_landmarks(
                1, q, [(own.document, 3, 8)], 5
            ).candidates.sort().values[0, 0].tolist() == [0, 1, 2, 3, 4]
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
            store.retrieval.landmark_keys(1, [(own.document, 3, 8)])
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
    assert store.export_document("book", file) == file.stat().st_size
    with MemoryStore.create(tmp_path / "other", SIGNATURE, codec="raw") as other:
        imported = other.import_document(file)
        assert replace(imported, id=document.id) == replace(document, bytes=imported.bytes)
        check_content(other, imported, text=1)
        assert other.import_document(file) == imported
        check_content(other, other.import_document(file, "again"), text=1)
        assert is_whole(other.path)
        ingest(other, "taken", 10, text=5)
        with pytest.raises(DocumentExists):
            other.import_document(file, "taken")
        check_content(other, ingest(other, "book", 90 * CHUNK, mode="replace"), text=1)
    with pytest.raises(Stop):
        ingest(store, "part", 9 * CHUNK, text=2, after_chunk=interrupt_at(CHUNK))
    with pytest.raises(InvalidInput, match="partly"):
        store.export_document("part", tmp_path / "part")
    with pytest.raises(InvalidInput):
        store.export_document("book", tmp_path / "no such directory" / "file")


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
        store.export_document("book", file)
    assert (os.path.lexists(file) and os.lstat(file)) == before
    assert (tmp_path / "text").read_text() == "my own words"
    assert is_whole(path) and store.documents() == [document]


def test_import_of_another_models_document_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    ingest(store, "book", 6 * CHUNK + 5)
    store.export_document("book", tmp_path / "book.memdoc")
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidInput):
            store.import_document(missing)
    with MemoryStore.create(tmp_path / "other", OTHER_MODEL) as other:
        with pytest.raises(WrongModel, match="weights"):
            other.import_document(tmp_path / "book.memdoc")
        assert other.documents() == []


def test_stores_of_a_replaced_directory_refuse_to_write(path: Path, tmp_path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", 100)
        store.export_document("book", tmp_path / "export")
    with reopened(path) as reader, reopened(path) as store:
        document = ingest(store, "next", 50, text=2)
        shutil.rmtree(path)
        with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as other:
            ingest(other, "another", 100, text=3)
            before = stored(path)
            for opened in (store, reader):
                for verb in (
                    lambda opened=opened: ingest(opened, "more", 100),
                    lambda opened=opened: opened.import_document(tmp_path / "export", "again"),
                    lambda opened=opened: opened.forget("book"),
                    lambda opened=opened: opened.forget("book", erase=True),
                    opened.compact,
                ):
                    with pytest.raises(MemoryNotFound, match="replaced"):
                        verb()
                check_content(opened, document, text=2)
            assert stored(path) == before
            ingest(other, "more", 30, text=3)  # its lock was given back
    assert is_whole(path)


# Verify


def test_verify_names_and_repair_drops_a_damaged_document(path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        whole = ingest(store, "whole", 100, text=2)
        damaged = ingest(store, "damaged", 100)
        report = store.verify()
        assert report.clean and report.documents == 2
        assert report.bytes == whole.bytes + damaged.bytes

        def flip(txn) -> None:
            key, value = next(
                item for item in txn.scan("blocks") if item[0] > damaged.id.to_bytes(8, "big")
            )
            txn.put("blocks", key, bytes(value[:-1]) + bytes([value[-1] ^ 1]))

        with opened_tables(path) as catalog:
            catalog.database.write(flip)
        assert not is_whole(path)
        report = store.verify(repair=True)
        assert [(p.document, p.name) for p in report.problems] == [(damaged.id, "damaged")]
        assert report.dropped == ["damaged"] and report.documents == 1
        assert [d.name for d in store.documents()] == ["whole"]
        check_content(store, whole, text=2)
        assert is_whole(path)
        check_content(store, ingest(store, "damaged", 100), text=1)


@pytest.mark.parametrize("table", ["blocks", "tokens", "landmarks", "documents", "passages"])
def test_verify_reports_keys_of_impossible_numbers(path: Path, table: str) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "book", 100)
    with opened_tables(path) as catalog:
        size = catalog.database.write(lambda txn: len(next(txn.scan(table), (bytes(8),))[0]))
        catalog.database.write(lambda txn: txn.put_checked(table, b"\xff" * size, b""))
    (problem,) = verify_memory(path).problems
    assert "never given out" in problem.what


@pytest.mark.parametrize("table", ["blocks", "tokens", "landmarks", "documents"])
def test_verify_finds_missing_rows(path: Path, table: str) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 100)

        def drop_one(txn) -> None:
            txn.delete(table, next(txn.scan(table))[0])

        with opened_tables(path) as catalog:
            catalog.database.write(drop_one)
    report = verify_memory(path, repair=True)
    assert [problem.document for problem in report.problems] == [document.id]
    assert is_whole(path)
    with MemoryStore.open(path) as store:
        assert store.documents() == []
