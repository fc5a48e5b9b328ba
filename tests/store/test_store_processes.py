"""Several processes, threads and openings read and write one memory."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.lmdb.database import Database
from memstore.disk.lmdb.transaction import Version
from memstore.errors import DocumentNotFound, MemoryLocked, MemoryNotFound
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from support.fork_server import RIGHT, SEVERAL, ForkServer
from support.synthetic_documents import (
    BUDGET,
    CHUNK,
    DIM,
    HEADS,
    SETTINGS,
    SIGNATURE,
    block,
    check_content,
    chunk,
    ingest,
    is_whole,
    opened,
    stored,
    token_ids,
)

KILLS = 4
SECONDS = 100  # until a test that waits has failed


@pytest.fixture
def elsewhere(children: ForkServer, tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in another process and returns what it printed."""

    def run(code: str, *arguments: object) -> str:
        assert children.run("python_job", tmp_path / "printed", code, *arguments) == RIGHT
        return (tmp_path / "printed").read_text()

    return run


def test_processes_that_make_one_memory_share_it(children: ForkServer, tmp_path: Path) -> None:
    make = "MemoryStore.create(f'{arguments[0]}/{n}', SIGNATURE, exist_ok=True).close()"
    code = f"for n in range(60): {make}"
    children.start("python_job", tmp_path / "printed", code, tmp_path)
    exec(code, {"MemoryStore": MemoryStore, "SIGNATURE": SIGNATURE, "arguments": [tmp_path]})
    assert children.end() == RIGHT


def test_forgetting_in_another_process_is_noticed(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 3 * CHUNK)
    units = [BlockKey(document.id, 1, 2, 0)]
    lease = store.lease(units)
    elsewhere("with MemoryStore.open(arguments[0]) as store: store.forget('book')", path)
    scope = [(document.id, 0, 4)]
    # leased units do not change
    assert torch.equal(lease.k[lease.slots[0]], block(1, 1, 2)[0][0])
    for read in (
        lambda: store.lease(units),
        lambda: store.retrieval.landmarks(scope).search(1, torch.zeros(HEADS, 1, DIM), scope, 1),
        lambda: store.retrieval.landmarks(scope).keys(1, scope),
        lambda: store.document("book"),
    ):
        with pytest.raises(DocumentNotFound):
            read()
    lease.release()


def test_reader_sees_commits_of_another_process(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    with opened(path, read_only=True) as reader:
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


def test_a_commit_is_seen_whose_number_was_known_before_its_rows(
    store: MemoryStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB tells the number of a commit some milliseconds before new views hold it."""
    ingest(store, "book", CHUNK)
    with opened(path) as reader:
        number = Database.version.fget

        def early(database: Database) -> Version:
            return Version(number(database).file, number(database).transaction + 1)

        with monkeypatch.context() as patch:
            patch.setattr(Database, "version", property(early))
            assert reader.has("book")
        store.forget("book")  # one commit, of the number that was told
        assert not reader.has("book") and reader.documents() == []


@pytest.mark.parametrize("one_store", [True, False])
def test_documents_are_written_concurrently(path: Path, one_store: bool) -> None:
    sizes = {text: (10 + 4 * text) * CHUNK + text for text in range(1, 5)}
    begun = threading.Barrier(len(sizes))
    with (
        MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store,
        nullcontext(store) if one_store else opened(path) as other,
    ):

        def write(text: int) -> None:
            def together(done: int) -> None:  # nobody ends before everybody has committed
                if done == 2 * CHUNK:
                    begun.wait(SECONDS)

            ingest(
                store if text % 2 else other,
                f"book {text}",
                sizes[text],
                text=text,
                commit_bytes=1 if text < 3 else 5000,
                after_chunk=together,
            )

        with ThreadPoolExecutor(len(sizes)) as pool:
            list(pool.map(write, sizes))
        for text, tokens in sizes.items():
            for reader in (store, other):
                document = reader.document(f"book {text}")
                assert (document.state, document.tokens) == ("ready", tokens)
                check_content(reader, document, text)
    assert is_whole(path)


def test_document_has_one_writer_at_a_time(store: MemoryStore, path: Path) -> None:
    ingest(store, "two", 10)
    with (
        opened(path) as again,
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


def test_killed_writers_leave_documents_absent_resumable_or_ready(
    children: ForkServer, path: Path
) -> None:
    MemoryStore.create(path, SIGNATURE).close()
    states: set[str] = set()
    for trial in range(KILLS):
        children.kill(0.02 + 0.05 * trial, "several_job", path)  # wherever that is
        assert is_whole(path)
        with opened(path) as store:
            for document in store.documents():
                states.add(document.state)
                assert document.state == "ready" or document.tokens % CHUNK == 0
                check_content(store, document, text=int(document.name))
    assert children.run("several_job", path) == RIGHT
    with opened(path) as store:
        assert [d.state for d in store.documents()] == ["ready"] * len(SEVERAL)
        for document in store.documents():
            assert document.tokens == SEVERAL[int(document.name)]
            check_content(store, document, text=int(document.name))


def test_stores_of_a_replaced_directory_refuse_to_write(path: Path, tmp_path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", 100)
        export_document(store, "book", tmp_path / "export")
    with opened(path) as reader, opened(path) as store:
        document = ingest(store, "next", 50, text=2)
        shutil.rmtree(path)
        with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as other:
            ingest(other, "another", 100, text=3)
            before = stored(path)
            for gone in (store, reader):
                for verb in (
                    lambda gone=gone: ingest(gone, "more", 100),
                    lambda gone=gone: import_document(gone, tmp_path / "export", "again"),
                    lambda gone=gone: gone.forget("book"),
                    lambda gone=gone: gone.forget("book", erase=True),
                    gone.compact,
                ):
                    with pytest.raises(MemoryNotFound, match="replaced"):
                        verb()
                check_content(gone, document, text=2)
            assert stored(path) == before
            ingest(other, "more", 30, text=3)  # its lock was given back
    assert is_whole(path)
